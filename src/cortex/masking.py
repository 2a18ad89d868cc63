"""Mask secrets in what cortex shows or records: by names, by forms of values, and by known values. Pure.

Names: of a key such as `password`, an option `--token`, a header or a query parameter such as `sig`. Forms: `Bearer X`,
`user:password@` in a URL, keys of well-known services. Known values: those of `env`, `.env` and of secrets in `config`,
wherever they are repeated. Keys of `cortex.yaml` itself are no secrets, such as `networking.auth`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_plus

MASK = "********"
_CODE_SECTIONS = ("handler", "predictor", "definition")
#: Sections with texts of the user, such as URLs.
_WITH_TEXTS = frozenset({*_CODE_SECTIONS, "networking", "schedule"})
#: Begin of the name of a field that the user has named.
_OWN_FIELD = re.compile(rf"(?:{'|'.join(_CODE_SECTIONS)})\.(env|config)\.|schedule\.submission\.")
_SECRET = re.compile(
    r"(?i)(pass(word|wd|phrase|code)s?|(?<![a-z])(pass|pw)|secrets?|token|credentials?|private|authorization|cookies?|dsn)_?\d*$"
    r"|(api|access|account|auth|encryption|private|signing|ssh|license|master|shared|storage|subscription)"
    r"[-_. ]?keys?(_?id)?_?\d*$"
    r"|^auth$|(^|[-_. ])(bearer|jwt|pwd)_?\d*$"
)
#: Further names of headers and query parameters, which may have these as a part, and names of whole words.
_CREDENTIAL = re.compile(
    r"(?i)auth|cookie|token|secret|passw|credential|signature|api[-_]?key|sess(ion|id)|^(key|code)$"
    r"|(^|[^a-z0-9])(sig|pwd|jwt|sid|csrf|xsrf|otp)($|[^a-z0-9])"
)
#: Tokens of language models.
_NO_SECRET = re.compile(r"(?i)(bos|eos|pad|unk|sep|cls|mask|stop|start|end)[-_. ]token$")
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
#: Deeper values are masked as a whole.
_MAX_DEPTH = 50
#: Shorter values are not searched for elsewhere, and of variables whose names are no secrets only what looks random.
_MIN_LENGTH = 6
#: Shorter values of lower-case letters alone may be words of ordinary texts, which would become unreadable.
_MIN_LETTERS = 12
#: Each value is searched for in each text, and callers of jobs choose both.
_MAX_VALUES = 50
_RANDOM = re.compile(r"(?=.*[A-Za-z])(?=.*[0-9])[A-Za-z0-9]{16,}")

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
#: Credentials in a URL, `scheme://user:password@host`.
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):([^/\s?#]+)(?=@)")
_MIN_KEY_LENGTH = 15
#: Keys of cortex, GitHub, GitLab, Hugging Face, OpenAI, Slack, AWS and Google, and JSON Web Tokens.
_KEY = re.compile(
    r"\b(c[kt]_[0-9a-f]{10}_[\w-]{43}|gh[pousr]_\w{36,}|github_pat_\w{22,}|glpat-[\w-]{20,}|hf_\w{30,}|sk-[\w-]{20,}"
    r"|xox[a-z]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{35}|(?<!-)eyJ[\w-]{8,2000}\.eyJ[\w-]{8,2000}\.[\w-]+)"
)
_QUOTED = r"\"[^\"]*\"|'[^']*'"
_SCHEME = re.compile(r"\b((?i:bearer)\s+)[^\s\"',;]+|\b((?i:basic)\s+)(?=[a-z+/]*[A-Z0-9=])[A-Za-z0-9+/]{4,}={0,2}")
_SIGN = r"(?:[\"']?[ \t]{0,20}(?:=[ \t]{0,20}|:[ \t]{0,20}(?![:/ \t])))(?!=)"
_ASSIGNED = re.compile(rf"([?&]|(?<![\w.%-]))([\w.%-]+)({_SIGN})({_QUOTED}|[^\s&;,\"'<>)\]}}]+)")
#: Values that tell no secret, as in `auth: none`.
_CONSTANTS = frozenset({"none", "null", "nil", "true", "false", "yes", "no", "on", "off", "disabled", "api_key"})
_OPTION = re.compile(rf"(?<![\w-])(--?[A-Za-z][\w-]*)(\s+)(?!-)({_QUOTED}|\S+)")
_HEADER = re.compile(r"(?im)((?:^|[\"'\s])((?:[a-z]+-)+[a-z]+|authorization|cookie): *)([^\"'\r\n]+)")


@lru_cache(1000)
def is_secret(key: str) -> bool:
    """Return True if the last word of a key is that of a secret, such as `token`."""
    words = _WORD_START.sub("_", key)
    return _SECRET.search(words) is not None and not _NO_SECRET.search(words)


@lru_cache(1000)
def is_credential(name: str) -> bool:
    """Return True if a header or query parameter of this name may have a credential."""
    return is_secret(name) or any(map(_CREDENTIAL.search, (name, _WORD_START.sub("_", name))))


def is_secret_field(field: str) -> bool:
    """Return True for the name of a field, such as `handler.config.db.password`, whose value may be a secret."""
    own = _OWN_FIELD.match(field)
    return own is not None and (own[1] == "env" or any(map(is_secret, field[own.end() :].split("."))))


def mask_known(text: str, values: Sequence[str] = ()) -> str:
    """Return a text without known values, passwords in URLs and keys of well-known services."""
    for value in values:
        if value in text:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", MASK, text)
    if "://" in text:
        text = _URL_PASSWORD.sub(rf"\1:{MASK}", text)
    return _KEY.sub(MASK, text) if len(text) >= _MIN_KEY_LENGTH else text


def mask_text(text: str, values: Sequence[str] = ()) -> str:
    """Return a text with its secrets masked; `values` are known ones, of `secret_values`."""
    text = mask_known(text, values)
    if _PRIVATE_KEY.search(text):
        return MASK
    text = _SCHEME.sub(lambda found: f"{found[1] or found[2]}{MASK}", text)
    # Most texts have none of these characters, and the searches cost a multiple.
    if "=" in text or ":" in text:
        text = _ASSIGNED.sub(_mask_assigned, text)
    if "-" in text:
        text = _OPTION.sub(lambda found: f"{found[1]}{found[2]}{MASK}" if is_secret(found[1]) else found[0], text)
    if ":" in text:
        text = _HEADER.sub(lambda found: f"{found[1]}{MASK}" if is_credential(found[2]) else found[0], text)
    return text


def _mask_assigned(found: re.Match[str]) -> str:
    name = unquote_plus(found[2])
    # `unexpected token : at line 3` is a sentence.
    is_prose = found[3][0].isspace() and ":" in found[3] and not any(map(str.isdigit, found[4]))
    if is_prose or found[4].lower() in _CONSTANTS:
        return found[0]
    return f"{found[1]}{found[2]}{found[3]}{MASK}" if (is_credential if found[1] else is_secret)(name) else found[0]


def mask_secrets(value: Any, values: Sequence[str] = ()) -> Any:
    """Return JSON data with masked secrets: by keys such as `password`, in texts, in lists such as `["--token", X]`."""
    return _mask(value, values, True)


def _mask(value: Any, values: Sequence[str], by_key: bool, depth: int = 0) -> Any:
    if isinstance(value, str):
        return mask_text(value, values)
    if value is None or isinstance(value, int | float):
        return value
    if depth > _MAX_DEPTH:
        return MASK
    if isinstance(value, Mapping):
        name = value.get("name", value.get("key")) if "value" in value else None
        return {
            key: MASK
            if by_key and _has_content(inner) and _is_secret_item(str(name if name and key == "value" else key), inner)
            else _mask(inner, values, by_key, depth + 1)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        before = ["", *value]
        return [
            MASK if _is_secret_option(option) and _has_content(inner) else _mask(inner, values, by_key, depth + 1)
            for option, inner in zip(before, value, strict=False)
        ]
    return value


def _is_secret_item(key: str, value: Any) -> bool:
    # Texts of `api_tokens`, but not the number `max_tokens`.
    return is_secret(key) or (not isinstance(value, int | float) and is_secret(key.removesuffix("s")))


def _is_secret_option(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("-") and is_secret(value) and not any(map(str.isspace, value))


def _has_content(value: Any) -> bool:
    return not isinstance(value, bool) and value not in (None, "", {}, [])


def mask_spec(spec: Mapping[str, Any], dotenv: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return an API's spec, in the keys of any file generation, with its secrets and all values of `env` masked.

    `dotenv` are the variables of `.env`, whose values are masked where the spec repeats them.
    """
    masked = {key: _mask(value, (), False) if key in _WITH_TEXTS else value for key, value in spec.items()}
    values = secret_values(spec, dotenv)
    for name in _CODE_SECTIONS:
        if isinstance(section := spec.get(name), Mapping):
            inner = masked[name]
            if isinstance(section.get("env"), Mapping):
                inner["env"] = dict.fromkeys(section["env"], MASK)
            if "config" in section:
                inner["config"] = mask_secrets(section["config"], values)
            if "command" in section:
                inner["command"] = _mask(section["command"], values, False)
    schedule = spec.get("schedule")
    if isinstance(schedule, Mapping) and "submission" in schedule:
        masked["schedule"]["submission"] = mask_secrets(schedule["submission"], values)
    return masked


def secret_values(spec: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the values of secrets of a spec and of environment variables, to mask them elsewhere; longest first."""
    found = {*_secret_variables(variables or {})}
    for name in _CODE_SECTIONS:
        if isinstance(section := spec.get(name), Mapping):
            env, config = section.get("env"), section.get("config")
            found |= {*_secret_variables(env if isinstance(env, Mapping) else {}), *_secret_texts(config)}
    return _longest_first(found)


def secrets_of_environment(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of environment variables with the names of secrets, and passwords in URLs."""
    return _secrets_of_variables(tuple(environ.items()))


@lru_cache(1)
def _secrets_of_variables(variables: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    named = {key: text for key, text in variables if key not in ("PWD", "OLDPWD")}  # of shells: folders
    return _longest_first(_secret_texts(named))


def _longest_first(values: Iterable[str]) -> tuple[str, ...]:
    found = {value for value in values if len(value) >= _MIN_LENGTH and value != MASK and not _is_common(value)}
    return tuple(sorted(found, key=len, reverse=True)[:_MAX_VALUES])


def _is_common(value: str) -> bool:
    """Return True for what may be an ordinary word or a path, such as that of a file with credentials."""
    return value.startswith("/") or (value.isalpha() and value.islower() and len(value) < _MIN_LETTERS)


def _secret_variables(env: Mapping[str, Any]) -> Iterator[str]:
    for key, value in env.items():
        yield from _secret_texts({key: value})
        if _RANDOM.fullmatch(str(value)):
            yield str(value)


def _secret_texts(value: Any, is_known: bool = False, depth: int = 0) -> Iterator[str]:
    """Yield the texts of secrets in JSON data, and the passwords in its URLs."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secret_texts(inner, is_known or is_secret(str(key)), depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secret_texts(inner, is_known, depth + 1)
    elif isinstance(value, str):
        if is_known:
            yield value.strip()
        yield from (found[2] for found in _URL_PASSWORD.finditer(value))


def mask_change(line: str) -> str:
    """Return a line of an API's history, such as `handler.config.token: a → b`, without the values of a secret."""
    field, _, change = line.partition(": ")
    if is_secret_field(field) and change not in ("added", "changed", "removed"):
        return f"{field}: changed"
    return f"{mask_text(field)}: {mask_text(change)}" if change else mask_text(line)
