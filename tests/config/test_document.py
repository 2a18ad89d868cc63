from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex.config.document import MAX_SIZE_BYTES, Document, Node, parse
from cortex.errors import ConfigError, Diagnostic

ROOT = Path(__file__).parents[2]


def read(text: str) -> Document:
    return parse(text.encode(), "cortex.yaml")


def refusal(text: str | bytes) -> Diagnostic:
    with pytest.raises(ConfigError) as raised:
        parse(text if isinstance(text, bytes) else text.encode(), "cortex.yaml")
    (diagnostic,) = raised.value.diagnostics
    return diagnostic


def find(document: Document, *path: str | int) -> Node:
    node = document.items[0].at(*path)
    assert node is not None
    return node


def test_every_key_and_value_has_its_position() -> None:
    document = read("# first\n- name: iris\n  compute:\n    cpu:   2\n    groups: [a,\n      b]\n")
    cpu = find(document, "compute", "cpu")
    assert (cpu.value, cpu.line, cpu.column, cpu.key_line, cpu.key_column) == (2, 4, 12, 4, 5)
    assert cpu.path == (0, "compute", "cpu")
    last = find(document, "compute", "groups", 1)
    assert (last.value, last.line, last.column, last.path) == ("b", 6, 7, (0, "compute", "groups", 1))
    assert document.items[0].plain() == {"name": "iris", "compute": {"cpu": 2, "groups": ["a", "b"]}}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("yes", True),
        ("Off", False),
        ("y", "y"),
        ("~", None),
        ("", None),
        ("0x1F", 31),
        ("0777", 511),
        ("0o17", 15),
        ("1_000", 1000),
        ("-5", -5),
        ("1e3", 1000.0),
        ("2.5", 2.5),
        ("2.", 2.0),
        ("12:30", "12:30"),
        ("2020-01-01", "2020-01-01"),
        ("25%", "25%"),
        ("'5'", "5"),
        ("!!str 5", "5"),
        ("200m", "200m"),
        ("1.2.3", "1.2.3"),
        (".", "."),
        ("_1", "_1"),
    ],
)
def test_parses_scalars_like_the_original(written: str, value: object) -> None:
    read_value = find(read(f"- a: {written}\n"), "a").value
    assert read_value == value
    assert type(read_value) is type(value)


def test_accepts_a_byte_order_mark_and_windows_line_endings() -> None:
    document = parse("\ufeff- name: iris\r\n  kind: api\r\n".encode(), "cortex.yaml")
    kind = find(document, "kind")
    assert (kind.value, kind.line, kind.column) == ("api", 2, 9)


def test_own_keys_override_merged_keys_and_both_keep_their_positions() -> None:
    document = read("- a: &base {x: 1, y: 2}\n  b:\n    <<: *base\n    y: 3\n  c:\n    <<: [*base, {x: 9, z: 4}]\n")
    assert find(document, "b").plain() == {"x": 1, "y": 3}
    assert find(document, "c").plain() == {"x": 1, "y": 2, "z": 4}
    merged = find(document, "b", "x")
    assert (merged.line, merged.column, merged.path) == (1, 16, (0, "b", "x"))


def test_all_duplicate_keys_are_reported_with_the_first_value_kept() -> None:
    document = read("- name: iris\n  name: other\n  compute:\n    cpu: 1\n    cpu: 2\n")
    assert [(p.line, p.column, p.path) for p in document.problems] == [(2, 3, "iris.name"), (5, 5, "iris.compute.cpu")]
    assert find(document, "compute", "cpu").value == 1


def test_items_without_a_name_are_labelled_by_index() -> None:
    document = read("- kind: api\n- name: 5\n- name: a b\n- name: ok\n")
    assert document.labels == {0: "resource at index 0", 1: "resource at index 1", 2: '"a b"', 3: "ok"}


def test_an_item_that_is_not_a_map_does_not_affect_the_others() -> None:
    document = read("- text\n- name: iris\n")
    assert [item.plain() for item in document.items] == [{"name": "iris"}]
    assert [str(p).split(" (")[0] for p in document.problems] == [
        'cortex.yaml:1:3: resource at index 0: "text": invalid type'
    ]


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", (1, 1), "must contain a list of maps"),
        ("[]", (1, 1), "must contain a list of maps"),
        ("name: iris\n", (1, 1), "must contain a list of maps"),
        ("text", (1, 1), "must contain a list of maps"),
        ("- a: 1\n\tb: 2\n", (2, 1), "a tab cannot be used here"),
        ("- a: b: c\n", (1, 7), 'a second ": " is not allowed here'),
        ("- a 1\n  b: 2\n", (1, 3), 'a ":" is missing after the key'),
        ("- a: 1\n   b: 2\n", (2, 4), "the indentation does not match the lines above"),
        ("- a:1\n  b: 2\n", (1, 5), "a space is missing after the colon"),
        ("- a: 1\n  b:2\n  c: 3\n", (2, 5), "a space is missing after the colon"),
        ("- a: 1\n  b:2 # c: 3\n", (2, 5), "a space is missing after the colon"),
        ("- a: 1\n  http://b\n  c: 3\n", (3, 3), 'a ":" is missing after the key'),
        ("- a: 'x\n  b: 1\n\n", (1, 6), "a quote is never closed"),
        ("- a: [1, 2\n", (1, 6), 'a list opened with "[" is not closed properly'),
        ("- a: {b: 1\n", (1, 6), 'a map opened with "{" is not closed properly'),
        ("- a: *nothing\n", (1, 6), "the alias has no anchor"),
        ("- a: &x 1\n  b: &x 2\n", (2, 6), "the anchor is defined twice"),
        ("- a: 1\n---\n- b: 1\n", (2, 1), "must be a single YAML document"),
        ("- a: @b\n", (1, 6), "this character cannot start a value"),
        ('- a: "\\q"\n', (1, 8), "invalid escape in a quoted string"),
        ('- a: "\\U7fffffff"\n', (1, 9), "invalid character escape"),
        ("- a: \x07\n", (1, 6), "character #x0007 is not allowed"),
        ("- " + "[" * 500, (1, 66), "is nested deeper than 64 levels"),
        ("- a: &a [*a]\n", (1, 6), "an alias contains itself, or is nested too deeply"),
        ("- &a\n  <<: *a\n", (1, 3), "merges too many maps"),
    ],
)
def test_invalid_yaml_is_one_mistake_with_its_position(text: str, place: tuple[int, int], message: str) -> None:
    diagnostic = refusal(text)
    assert ((diagnostic.line, diagnostic.column), diagnostic.message) == (place, message)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("apiVersion: v1\nkind: Pod\n", "this is a manifest of Kubernetes; pass a cortex.yaml"),
        (
            "service: s:Iris\ninclude: ['*.py']\n",
            "this is a bentofile.yaml; write a cortex.yaml, as docs/coming-from/bentoml.md shows",
        ),
        (
            "python:\n  packages: [torch]\n",
            "this is a bentofile.yaml; write a cortex.yaml, as docs/coming-from/bentoml.md shows",
        ),
        (
            "applications:\n- name: a\n",
            "this is a configuration of Ray Serve; write a cortex.yaml, as docs/coming-from/ray-serve.md shows",
        ),
        (
            "import_path: a:b\n",
            "this is a configuration of Ray Serve; write a cortex.yaml, as docs/coming-from/ray-serve.md shows",
        ),
        ("apis:\n- name: a\n", 'remove "apis:": the file is a list of APIs'),
        ("name: a\napis:\n- name: b\n", 'put "- " before the first key and indent the others'),
        ("name: a\nkind: RealtimeAPI\npython: 3\n", 'put "- " before the first key and indent the others'),
        ("? [a]\n: b\n", 'put "- " before the first key and indent the others'),
    ],
)
def test_a_map_is_recognised_by_its_keys(text: str, fix: str) -> None:
    assert refusal(text).fix == fix
    assert all((ROOT / page).is_file() for page in re.findall(r"docs/\S+", fix))


def test_suggests_that_plain_text_is_not_a_configuration_file() -> None:
    assert refusal("Hello\n").fix == 'is this a configuration file? write "- name: …" for each API'


def test_locates_bytes_that_are_not_utf8() -> None:
    diagnostic = refusal(b"- name: iris\n  path: caf\xe9.py\n")
    assert (diagnostic.line, diagnostic.column, diagnostic.message) == (2, 12, "is not UTF-8 text (byte 0xe9)")


def test_rejects_a_file_over_the_size_limit_without_parsing() -> None:
    assert "is too big" in refusal(b"#" * (MAX_SIZE_BYTES + 1)).message


def test_rejects_an_alias_bomb_before_expansion() -> None:
    levels = "".join(f"- b: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9))
    assert "values once its aliases are expanded" in refusal("- a: &a [x, x]\n" + levels).message


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("- a: .nan\n", '".nan" is not a number that JSON can represent'),
        ("- a: 1e999\n", '"1e999" is not a number that JSON can represent'),
        (f"- a: {2**64}\n", f'"{2**64}" is not a number that JSON can represent'),
        ("- a: !!python/object:os.system x\n", 'tag "python/object:os.system" is not supported'),
        ("- a: !!int x\n", '"x" does not fit its tag "int"'),
        ("- a: !!set {b}\n", 'tag "set" is not supported'),
        ('- a: "\\uD800"\n', "an unpaired surrogate is not a valid character"),
        ("- on: 1\n", "key on must be a string"),
        ("- a: {{ b }}\n", "a map or list cannot be a key"),
        ("- a: 1\n  <<: 5\n", "can only merge maps"),
    ],
)
def test_reports_values_that_json_cannot_represent_and_continues(written: str, message: str) -> None:
    assert [problem.message for problem in read(written).problems] == [message]


YAML_TEXT = st.one_of(
    st.text(),
    st.text(alphabet="-: \n\tab[]{},&*!|>'\"#%@<?~.0159\\"),
    st.lists(
        st.sampled_from(
            ["- ", "a: ", "b", "\n", "  ", "&x ", "*x", "<<: ", "[", "]", "{", "}", "'", '"', "1", "~", ":", ","]
        )
    ).map("".join),
)


@given(YAML_TEXT)
@settings(max_examples=3 * settings().max_examples)
def test_any_text_is_parsed_or_rejected_at_a_position_inside_it(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    lines = max(len(text.replace("\r\n", "\n").splitlines()), 1)
    try:
        problems = parse(data, "cortex.yaml").problems
    except ConfigError as error:
        problems = error.diagnostics
        assert problems
    for problem in problems:
        assert 1 <= problem.line <= lines
        assert problem.column >= 1
        assert "\n" not in str(problem)


@given(st.binary())
def test_any_bytes_are_parsed_or_rejected(data: bytes) -> None:
    try:
        parse(data, "cortex.yaml")
    except ConfigError as error:
        assert all(problem.line >= 1 for problem in error.diagnostics)
