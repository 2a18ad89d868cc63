"""Path templates of routes: which paths they match, which templates are refused, and their order."""

from __future__ import annotations

import pytest

from cortex.payloads.path_template import RouteError, canonical_path, decode_value, parse_template

MATCHES = [
    ("/users", "/users", ()),
    ("/users", "/users/", ()),
    ("/users/", "/users", ()),
    ("/users", "/users/1", None),
    ("/users", "/Users", None),
    ("/users/{id}", "/users/7", ("7",)),
    ("/users/{id}", "/users/7/", ("7",)),
    ("/users/{id}", "/users/", None),
    ("/users/{id}", "/users/7/8", None),
    ("/users/{id}", "/users/a%2Fb", ("a/b",)),
    ("/users/{id}", "/users/%C3%A4%20b", ("ä b",)),
    ("/{a}/x/{b}", "/1/x/2", ("1", "2")),
    ("/files/{name}.json", "/files/a.b.json", ("a.b",)),
    ("/files/{name:path}", "/files/a/b%2Fc/", ("a/b/c/",)),
    ("/files/{name:path}", "/files/", None),
    ("/größe", "/gr%C3%B6%C3%9Fe", ()),
    ("/a%20b", "/a%20b", ()),
    ("/a.b+c", "/a%2Eb+c", ()),
    ("/a.b", "/aXb", None),
]


@pytest.mark.parametrize(("template", "path", "values"), MATCHES)
def test_templates_match_whole_paths(template: str, path: str, values: tuple[str, ...] | None) -> None:
    found = parse_template(template).match(canonical_path(path))
    assert (None if found is None else tuple(map(decode_value, found))) == values


REFUSED = [
    ("users", "does not begin with a slash", 'write "/users"'),
    ("/", "is the endpoint itself", "handle_post"),
    ("//a", 'has the segment ""', "remove it"),
    ("/a/../b", 'has the segment ".."', "remove it"),
    ("/a?b=1", "has a character that no path has", "query_params"),
    ("/a/{id", "a brace without its counterpart", "{name}"),
    ("/a/{id:int}", 'the convertor "int"', "annotate the argument id"),
    ("/a/{}", 'has the parameter ""', "name of an argument"),
    ("/a/{a-b}", 'has the parameter "a-b"', "name of an argument"),
    ("/{a}-{b}", "two parameters in one segment", "slash"),
    ("/{a}/{a}", "the parameter a twice", "its own name"),
    ("/{a:path}/b", "continues after {a:path}", "at the end"),
    ("/x-{a:path}", "continues after {a:path}", "at the end"),
]


@pytest.mark.parametrize(("template", "message", "fix"), REFUSED)
def test_other_templates_are_refused_with_a_fix(template: str, message: str, fix: str) -> None:
    with pytest.raises(RouteError, match="the path") as caught:
        parse_template(template)
    assert message in caught.value.message
    assert fix in caught.value.fix


def test_the_more_specific_template_comes_first() -> None:
    texts = ["/{rest:path}", "/{a}/b", "/a/{b}", "/a/{b}.json", "/a/b", "/a/{b}/c"]
    ordered = sorted(map(parse_template, texts), key=lambda template: template.rank)
    assert [each.text for each in ordered] == ["/a/b", "/a/{b}.json", "/a/{b}", "/a/{b}/c", "/{a}/b", "/{rest:path}"]


def test_templates_of_the_same_paths_have_the_same_shape() -> None:
    assert parse_template("/a/{x}/").shape == parse_template("/a/{y}").shape == "/a/{}"
    assert parse_template("/a/{x:path}").shape == "/a/{:path}"
    assert parse_template("/gr%C3%B6sse").shape == parse_template("/grösse").shape


def test_a_value_that_is_not_utf_8_is_refused() -> None:
    (value,) = parse_template("/a/{x}").match(canonical_path("/a/%FF")) or ()
    with pytest.raises(UnicodeDecodeError):
        decode_value(value)
