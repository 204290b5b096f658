"""Arguments win over the environment, the environment over defaults, and nonsense is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from fastpersist.engines import Engine, open_engine
from fastpersist.errors import AlignmentError
from fastpersist.options import choose, ready_engine
from fastpersist.probing.profile import Profile


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINE", "BLOCK_NBYTES", "QUEUE_DEPTH"):
        monkeypatch.delenv(f"FASTPERSIST_{name}", raising=False)


def block_nbytes(value: int | None, engine: str | Engine = "auto") -> int:
    return choose(engine, value, None, "path").block_nbytes


def queue_depth(value: int | None, engine: str | Engine = "auto") -> int:
    return choose(engine, None, value, "path").queue_depth


def test_defaults() -> None:
    assert block_nbytes(None) == 8 << 20
    assert queue_depth(None) == 8


def test_the_environment_sets_defaults_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_BLOCK_NBYTES", "65536")
    monkeypatch.setenv("FASTPERSIST_QUEUE_DEPTH", "3")
    assert (block_nbytes(None), queue_depth(None)) == (65536, 3)
    assert (block_nbytes(4096), queue_depth(2)) == (4096, 2)


def test_an_open_engine_brings_its_own_sizes() -> None:
    with open_engine("null", block_nbytes=8192, queue_depth=5) as engine:
        assert block_nbytes(None, engine) == 8192
        assert queue_depth(None, engine) == 5
        assert queue_depth(2, engine) == 2
        with pytest.raises(ValueError, match="queue_depth=6 exceeds the 5"):
            queue_depth(6, engine)


def test_the_environment_never_exceeds_an_open_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_QUEUE_DEPTH", "64")
    with open_engine("null", queue_depth=5) as engine:
        assert queue_depth(None, engine) == 5


def test_beside_training_blocks_that_nobody_asked_for_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(value: int | None) -> int:
        return choose("auto", value, None, "path", beside_training=True).block_nbytes

    assert beside(None) == 32 << 20
    assert beside(8192) == 8192
    monkeypatch.setenv("FASTPERSIST_BLOCK_NBYTES", "65536")
    assert beside(None) == 65536


@pytest.mark.parametrize("value", [0, -4096, 1, 4095, 6000])
def test_a_misaligned_block_is_refused(value: int) -> None:
    with pytest.raises(AlignmentError, match=f"multiple of 4096, not {value}"):
        block_nbytes(value)


def test_a_block_that_no_transfer_can_move_is_refused() -> None:
    with pytest.raises(ValueError, match="block_nbytes must be at most"):
        block_nbytes(1 << 31)


@pytest.mark.parametrize("value", [0, -1])
def test_a_queue_without_room_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="queue_depth must be at least 1"):
        queue_depth(value)


@pytest.mark.parametrize("name", ["BLOCK_NBYTES", "QUEUE_DEPTH"])
def test_a_broken_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"FASTPERSIST_{name}", "many")
    with pytest.raises(ValueError, match=f"FASTPERSIST_{name} must be a whole number, not 'many'"):
        choose("auto", None, None, "path")


@pytest.mark.parametrize("profile", [None, Profile("posix", 1 << 20, 3)])
@pytest.mark.parametrize("engine", ["auto", "io_uring"])
@pytest.mark.parametrize("environment", [None, "auto", "posix", "null"])
def test_all_are_chosen_from_one_look_at_the_profile(
    monkeypatch: pytest.MonkeyPatch, profile: Profile | None, engine: str, environment: str | None
) -> None:
    looks: list[object] = []
    monkeypatch.setattr("fastpersist.options.load_profile", lambda path: (looks.append(path), profile)[1])
    if environment is not None:
        monkeypatch.setenv("FASTPERSIST_ENGINE", environment)
    choice = choose(engine, None, None, "path")
    assert looks == ["path"] * (engine == "auto")
    used = profile if engine == "auto" and environment in (None, "auto", "posix") else None
    expected = environment or (used.engine if used else "auto") if engine == "auto" else engine
    assert choice == (expected, used.block_nbytes if used else 8 << 20, used.queue_depth if used else 8)
    assert choose(engine, 4096, 2, "path") == (choice.engine, 4096, 2)


def test_what_cannot_be_chosen_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="unknown engine"):
        choose("tape", None, None, "path")
    with pytest.raises(AlignmentError):
        choose("auto", 1, None, "path")
    with pytest.raises(ValueError, match="queue_depth must be at least 1"):
        choose("auto", None, 0, "path")


def test_an_engine_opened_by_name_is_closed_and_an_open_one_is_not() -> None:
    with ready_engine("null", "path", 4096, 2) as engine:
        assert engine.name == "null"
    assert engine._closed
    with open_engine("null") as mine:
        with ready_engine(mine, "path", 4096, 2) as engine:
            assert engine is mine
        assert not mine._closed


def test_the_environment_names_the_engine_for_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_ENGINE", "null")
    assert choose("auto", None, None, "path").engine == "null"
    assert choose("posix", None, None, "path").engine == "posix"


@pytest.mark.parametrize(
    ("engine", "error", "message"), [("memory", ValueError, "open_engine\\('memory'\\)"), (7, TypeError, "not int")]
)
def test_what_is_no_usable_engine_is_refused(engine: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose(engine, None, None, "path")
