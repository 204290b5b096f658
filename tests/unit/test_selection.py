"""Prefixes, predicates and walks over nests of dicts."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from fastpersist.archive.selection import MAX_DEPTH, as_predicate, select, walk


@pytest.mark.parametrize(
    ("only", "path", "wanted"),
    [
        ("a", "a", True), ("a", "a.b", True), ("a", "ab", False), ("a", "b.a", False), ("a.", "a.b", True), ("a.", "a", True),
        ("a.b", "a", False), ("a.b", "a.b.c", True), ("a.b", "a.bc", False), ("0", "0.x", True), ("a b", "a b", True),
        (["a", "b"], "b.x", True), (["a", "b"], "c", False), (("é",), "é.x", True), ({"a": 1}, "a", True),
        (lambda path: path == "x", "x", True), (lambda path: path == "x", "x.y", False),
    ],
)  # fmt: skip
def test_a_prefix_selects_a_value_and_all_below_it(only: Any, path: str, wanted: bool) -> None:
    assert as_predicate(only)(path) is wanted


def test_a_generator_is_used_up_once() -> None:
    predicate = as_predicate(prefix for prefix in ("a", "b"))
    assert [predicate(path) for path in ("a", "b", "a", "c")] == [True, True, True, False]


@pytest.mark.parametrize("only", ["", [""], [1], [None], b"a", [b"a"], 5, None, 1.5, [["a"]]], ids=repr)
def test_other_forms_are_a_type_error(only: Any) -> None:
    with pytest.raises(TypeError):
        as_predicate(only)


@pytest.mark.parametrize("only", [[], (), {}, iter(())], ids=repr)
def test_no_prefix_at_all_is_a_value_error(only: Any) -> None:
    with pytest.raises(ValueError, match="no prefix"):
        as_predicate(only)


def test_walk_visits_each_value_by_its_path() -> None:
    seen: dict[str, Any] = {}
    obj = {"a": 1, "b": {"c": [2], 3: {"d": None}}, "e": {}, 0: ()}

    def visit(path: str, value: Any) -> bool:
        seen[path] = value
        return True

    walk(obj, visit)
    assert seen == {"a": 1, "b.c": [2], "b.3.d": None, "e": {}, "0": ()}
    assert obj == {"a": 1, "b": {"c": [2], 3: {"d": None}}, "e": {}, 0: ()}


def test_dicts_that_lose_all_values_go_as_well() -> None:
    obj = {"a": {"b": {"c": 1}}, "d": {"e": 2, "f": 3}}
    assert select(obj, as_predicate("d.f")) == {"d": {"f": 3}}


def test_the_object_itself_is_cut_and_keeps_its_type() -> None:
    obj = collections.OrderedDict([("b", 1), ("a", collections.OrderedDict([("y", 2), ("x", 3)]))])
    inner = obj["a"]
    found = select(obj, as_predicate("a"))
    assert found is obj
    assert found["a"] is inner
    assert list(inner) == ["y", "x"]


@pytest.mark.parametrize("obj", [[], (1,), None, "text", 1, object()], ids=lambda obj: type(obj).__name__)
def test_what_is_no_dict_is_named(obj: Any) -> None:
    with pytest.raises(TypeError, match=f"holds a {type(obj).__name__}"):
        select(obj, as_predicate("a"))


@pytest.mark.parametrize("key", [(1,), 1.0, None, b"x", frozenset()], ids=repr)
def test_keys_of_other_types_are_named_with_their_place(key: Any) -> None:
    with pytest.raises(TypeError, match=r"at 'a\.b'"):
        select({"a": {"b": {key: 1}}}, as_predicate("a"))
    with pytest.raises(TypeError, match="at 'the top'"):
        select({key: 1}, as_predicate("a"))


def test_a_selection_of_nothing_names_up_to_twenty_keys() -> None:
    with pytest.raises(KeyError, match="selects nothing") as caught:
        select({f"key{index}": index for index in range(30)}, as_predicate("other"))
    assert "'key19'" in str(caught.value)
    assert "'key20'" not in str(caught.value)


def test_depth_is_bounded() -> None:
    obj: dict[str, Any] = {"x": 1}
    for _ in range(MAX_DEPTH):
        obj = {"x": obj}
    assert select(obj, as_predicate("x")) is obj
    with pytest.raises(ValueError, match=f"no deeper than {MAX_DEPTH}"):
        select({"x": obj}, as_predicate("x"))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_dict_in_two_places_is_refused(order: str) -> None:
    """Cut for one of its places, it would be cut for the other as well."""
    obj = dict(zip(order, [{"x": 1, "y": 2}] * 2, strict=True))
    with pytest.raises(ValueError, match="stands in two places") as caught:
        select(obj, as_predicate("a.x"))
    assert "'a'" in str(caught.value)
    assert "'b'" in str(caught.value)


def test_equal_dicts_and_empty_ones_are_not_one_dict() -> None:
    nothing: dict[str, int] = {}
    obj = {"a": {"x": 1}, "b": {"x": 1}, "c": nothing, "d": nothing}
    assert select(obj, as_predicate(["b", "d"])) == {"b": {"x": 1}, "d": {}}


@pytest.mark.timeout(10)
def test_shared_dicts_are_not_walked_once_for_each_path() -> None:
    obj: dict[str, Any] = {"x": 1}
    for _ in range(60):
        obj = {"a": obj, "b": obj}
    with pytest.raises((KeyError, ValueError)):
        select(obj, as_predicate("other"))
