"""Evidence about the difference of two rates: false alarms, power, and the property that guarantees them."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.operator.canary.evidence import Claim, CountWindow, Evidence, log_mean

LIMIT = math.log(1 / 0.01)


def count(generator: random.Random, of: int, rate: float) -> int:
    return sum(generator.random() < rate for _ in range(of))


def observed(evidence: Evidence, windows: list[CountWindow]) -> Evidence:
    for window in windows:
        evidence.observe(window)
    return evidence


@given(
    rate=st.floats(0.0, 0.9),
    difference=st.floats(0.0, 0.5),
    margin=st.floats(-0.2, 0.2),
    claim=st.sampled_from(Claim),
    na=st.integers(1, 4),
    nb=st.integers(1, 4),
    expected=st.floats(0.001, 0.9),
)
def test_a_factor_has_an_expectation_of_at_most_one_if_the_claim_is_true(
    rate: float, difference: float, margin: float, claim: Claim, na: int, nb: int, expected: float
) -> None:
    other = rate + margin - claim.value * difference
    if not 0 <= other <= 1:
        return
    total = 0.0
    for a, b in product(range(na + 1), range(nb + 1)):
        chance = (
            math.comb(na, a) * rate**a * (1 - rate) ** (na - a) * math.comb(nb, b) * other**b * (1 - other) ** (nb - b)
        )
        evidence = Evidence(claim, margin, rate=expected)
        evidence.observe(CountWindow(na, a, nb, b))
        total += chance * math.exp(evidence.log)
    assert total <= 1 + 1e-6


@pytest.mark.parametrize("weight", [0.1, 1.0])
def test_evidence_that_is_collected_anew_has_an_expectation_of_at_most_the_sum_of_weights(weight: float) -> None:
    rate, margin, total = 0.2, 0.05, 0.0
    for counts in product(range(4), repeat=4):
        evidence = Evidence(Claim.AT_MOST, margin, rate=0.3)
        evidence.observe(CountWindow(3, counts[0], 3, counts[1]))
        evidence.collect_anew(weight)
        evidence.observe(CountWindow(3, counts[2], 3, counts[3]))
        rates = (rate, rate + margin) * 2
        chances = [math.comb(3, n) * each**n * (1 - each) ** (3 - n) for n, each in zip(counts, rates, strict=True)]
        total += math.prod(chances) * math.exp(evidence.log)
    assert total <= 1 + weight + 1e-6


@pytest.mark.parametrize("claim", Claim)
@pytest.mark.heavy
def test_few_trials_ever_refute_a_true_claim_whose_rates_change(claim: Claim) -> None:
    """Both versions have bursts of errors, and the new one has exactly the difference that is tolerated."""
    generator, refuted, trials, margin = random.Random(7), 0, 50, 0.01
    for _ in range(trials):
        evidence = Evidence(claim, margin, rate=0.02)
        for _ in range(40):
            rate = 0.3 if generator.random() < 0.1 else 0.02
            na, nb = generator.randrange(0, 60), generator.randrange(0, 12)
            evidence.observe(CountWindow(na, count(generator, na, rate), nb, count(generator, nb, rate + margin)))
            if evidence.log >= LIMIT:
                refuted += 1
                break
    assert refuted <= 3  # half a one is expected at most


@pytest.mark.parametrize(
    ("claim", "old", "new", "margin", "requests"),
    [
        (Claim.AT_MOST, 0.01, 0.05, 0.005, 1_500),
        (Claim.AT_MOST, 0.0, 0.03, 0.01, 1_500),
        (Claim.AT_MOST, 0.5, 0.6, 0.02, 2_500),
        (Claim.AT_LEAST, 0.01, 0.01, 0.02, 2_500),
        (Claim.AT_LEAST, 0.0, 0.0, 0.01, 1_500),
        (Claim.AT_LEAST, 0.05, 0.01, 0.0, 2_500),
    ],
)
def test_a_false_claim_is_refuted_soon(claim: Claim, old: float, new: float, margin: float, requests: int) -> None:
    generator = random.Random(3)
    evidence = Evidence(claim, margin, rate=old)
    seen = 0
    while evidence.log < LIMIT:
        evidence.observe(CountWindow(90, count(generator, 90, old), 10, count(generator, 10, new)))
        seen += 10
        assert seen <= requests


def test_growth_predicts_the_requests_that_are_missing() -> None:
    generator = random.Random(5)
    evidence = Evidence(Claim.AT_MOST, 0.01, rate=0.02)
    totals = [0, 0, 0, 0]
    while evidence.log < LIMIT / 2:
        window = CountWindow(90, count(generator, 90, 0.02), 10, count(generator, 10, 0.08))
        evidence.observe(window)
        totals = [total + each for total, each in zip(totals, window, strict=True)]
    predicted = (LIMIT - evidence.log) / evidence.growth(CountWindow(*totals))
    before = totals[2]
    while evidence.log < LIMIT:
        evidence.observe(CountWindow(90, count(generator, 90, 0.02), 10, count(generator, 10, 0.08)))
        totals[2] += 10
    assert predicted / 4 < totals[2] - before < predicted * 4


def test_growth_is_zero_where_the_counts_agree_with_the_claim() -> None:
    assert Evidence(Claim.AT_MOST, 0.01).growth(CountWindow(100, 2, 100, 2)) == 0
    assert Evidence(Claim.AT_LEAST, 0.01).growth(CountWindow(100, 2, 100, 9)) == 0
    assert Evidence(Claim.AT_MOST, 0.0).growth(CountWindow(0, 0, 100, 9)) == 0


def test_windows_without_requests_of_a_version_are_no_evidence() -> None:
    for claim in Claim:
        assert (
            observed(
                Evidence(claim, 0.0), [CountWindow(0, 0, 50, 50), CountWindow(500, 5, 0, 0), CountWindow(0, 0, 0, 0)]
            ).log
            == 0
        )


def test_errors_in_clusters_count_less() -> None:
    windows = [CountWindow(90, 1, 10, 8)] * 3
    one = observed(Evidence(Claim.AT_MOST, 0.0, rate=0.01), windows).log
    four = observed(Evidence(Claim.AT_MOST, 0.0, cluster=4.0, rate=0.01), windows).log
    assert 0 < four < one / 2


def test_a_block_adds_at_most_its_cap_and_loses_without_limit() -> None:
    evidence = Evidence(Claim.AT_MOST, 0.0, rate=0.01, cap=2.0)
    for block in (1, 2):
        evidence.begin_block()
        observed(evidence, [CountWindow(90, 1, 10, 10)] * 9)
        assert evidence.log == pytest.approx(2.0 * block, abs=0.5)
    evidence.begin_block()
    assert observed(evidence, [CountWindow(90, 1, 90, 0)] * 99).log < 0.5


def test_the_mean_of_evidence_is_dominated_by_the_largest() -> None:
    assert log_mean([0.0, 0.0]) == 0
    assert log_mean([1000.0, 0.0]) == pytest.approx(1000 - math.log(2))
