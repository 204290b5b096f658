"""Profiles: found again on their filesystem, replaced whole, ignored with one log line when they are of no use."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import fastpersist
from fastpersist.engines import Availability, engine_class, open_engine
from fastpersist.options import choose
from fastpersist.probing import profile as module
from fastpersist.probing.profile import Profile, load_profile, profile_file, save_profile

PROFILE = Profile("posix", 1 << 20, 3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of each test's own, and no environment variable of the user's."""
    for name in ("ENGINE", "BLOCK_NBYTES", "QUEUE_DEPTH"):
        monkeypatch.delenv(f"FASTPERSIST_{name}", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_profile_serves_its_whole_filesystem(tmp_path: Path, cache: Path) -> None:
    file = save_profile(tmp_path, PROFILE, gb_per_s=1.5)
    (tmp_path / "deep").mkdir()
    assert file.is_relative_to(cache / "fastpersist")
    for path in (tmp_path, tmp_path / "new.pt", str(tmp_path / "deep" / "new.pt"), os.fsencode(tmp_path)):
        assert load_profile(path) == PROFILE  # type: ignore[arg-type]


def test_a_bare_name_lies_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(tmp_path, PROFILE, gb_per_s=1.5)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.pt").touch()
    assert load_profile("new.pt") == load_profile("old.pt") == PROFILE


def test_another_filesystem_has_another_profile(tmp_path: Path) -> None:
    if os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("the temporary directory lies on /dev/shm")
    save_profile(tmp_path, PROFILE, gb_per_s=1.5)
    assert load_profile("/dev/shm/new.pt") is None


def test_a_symlink_leads_to_the_filesystem_of_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    assert profile_file(tmp_path / "link" / "new.pt") == profile_file("/dev/shm")


@pytest.mark.parametrize("path", ["/no/such/directory/x.pt", "nul\0byte", 7.5, None])
def test_what_is_no_path_has_no_profile(path: Any) -> None:
    assert load_profile(path) is None


def test_the_default_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        found = profile_file(tmp_path)
        assert found is not None
        assert found.is_relative_to(tmp_path / "home" / ".cache" / "fastpersist")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": 2}, "version"),
        ({"host": "elsewhere"}, "another machine"),
        ({"kernel": "2.6"}, "another kernel"),
        ({"created": 0}, "older than 180 days"),
        ({"created": int(time.time()) + 10 * 86400}, "future"),
        ({"created": "yesterday"}, "older"),
        ({"engine": "warp"}, "unknown engine"),
        ({"engine": "null"}, "keeps nothing"),
        ({"engine": None}, "engine is None"),
        ({"block_nbytes": 1000}, "block_nbytes is 1000"),
        ({"block_nbytes": True}, "block_nbytes is True"),
        ({"block_nbytes": 1 << 40}, "block_nbytes"),
        ({"queue_depth": 0}, "queue_depth is 0"),
        ({"queue_depth": "many"}, "queue_depth is 'many'"),
    ],
)
def test_a_stale_profile_is_ignored_and_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], reason: str
) -> None:
    file = save_profile(tmp_path, PROFILE, gb_per_s=1.5)
    _change(file, **fields)
    assert load_profile(tmp_path) is None
    assert load_profile(tmp_path) is None
    assert [reason in record.message for record in caplog.records] == [True]
    assert "--save-profile" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 60_000, b"1" * 60_000, b'{"version": 1}'])
def test_a_broken_profile_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    save_profile(tmp_path, PROFILE, gb_per_s=1.5).write_bytes(content)
    assert load_profile(tmp_path) is None
    assert "is ignored" in caplog.text


def test_a_profile_of_an_engine_that_cannot_run_any_more_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(tmp_path, PROFILE, gb_per_s=1.5)
    refusal = Availability(usable=False, reason="out of order", remedy="mend it")
    monkeypatch.setattr(engine_class("posix"), "availability", classmethod(lambda cls: refusal))
    assert load_profile(tmp_path) is None


def test_a_new_profile_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    save_profile(tmp_path, PROFILE, gb_per_s=1.5)
    assert load_profile(tmp_path) == PROFILE
    file = save_profile(tmp_path, Profile("posix", 1 << 22, 4), gb_per_s=2)
    assert load_profile(tmp_path) == Profile("posix", 1 << 22, 4)
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_old_profile_and_no_debris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    file = save_profile(tmp_path, PROFILE, gb_per_s=1.5)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, step, fail)
        with pytest.raises(OSError, match="No space left"):
            save_profile(tmp_path, Profile("posix", 4096, 1), gb_per_s=2)
    assert os.listdir(file.parent) == [file.name]
    assert load_profile(tmp_path) == PROFILE


def test_without_a_cache_directory_saving_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cache_directory", lambda: None)
    with pytest.raises(FileNotFoundError, match="XDG_CACHE_HOME"):
        save_profile(tmp_path, PROFILE, gb_per_s=1)


def _sizes(path: Path, engine: str = "auto") -> tuple[int, int]:
    choice = choose(engine, None, None, path)
    return choice.block_nbytes, choice.queue_depth


def test_the_profile_replaces_defaults(tmp_path: Path) -> None:
    save_profile(tmp_path, PROFILE, gb_per_s=1.5)
    assert _sizes(tmp_path / "new.pt") == (1 << 20, 3)


@pytest.mark.parametrize(("block_nbytes", "beside_training"), [(1 << 20, 32 << 20), (64 << 20, 64 << 20)])
def test_beside_training_the_profile_never_makes_blocks_small(tmp_path: Path, block_nbytes: int, beside_training: int) -> None:
    save_profile(tmp_path, dataclasses.replace(PROFILE, block_nbytes=block_nbytes), gb_per_s=1.5)
    choice = choose("auto", None, None, tmp_path / "new.pt", beside_training=True)
    assert (choice.block_nbytes, choice.queue_depth) == (beside_training, 3)


def test_the_environment_and_arguments_win_over_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(tmp_path, PROFILE, gb_per_s=1.5)
    monkeypatch.setenv("FASTPERSIST_BLOCK_NBYTES", "65536")
    monkeypatch.setenv("FASTPERSIST_QUEUE_DEPTH", "5")
    assert _sizes(tmp_path) == (65536, 5)
    assert choose("auto", 8192, 7, tmp_path)[1:] == (8192, 7)


def test_sizes_measured_with_one_engine_are_not_given_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(tmp_path, PROFILE, gb_per_s=1.5)
    assert _sizes(tmp_path, "posix") == (8 << 20, 8)
    monkeypatch.setenv("FASTPERSIST_ENGINE", "null")
    assert _sizes(tmp_path) == (8 << 20, 8)
    monkeypatch.setenv("FASTPERSIST_ENGINE", "posix")
    assert _sizes(tmp_path) == (1 << 20, 3)


def test_an_open_engine_is_none_of_the_profiles_business(tmp_path: Path) -> None:
    save_profile(tmp_path, PROFILE, gb_per_s=1.5)
    with open_engine("null", block_nbytes=8192, queue_depth=5) as engine:
        assert choose(engine, None, None, tmp_path) == (engine, 8192, 5)


def test_auto_takes_the_profiles_engine_unless_the_environment_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile(tmp_path, PROFILE, gb_per_s=1.5)
    assert choose("auto", None, None, tmp_path / "new.pt").engine == "posix"
    monkeypatch.setenv("FASTPERSIST_ENGINE", "null")
    assert choose("auto", None, None, tmp_path / "new.pt").engine == "null"


def test_a_save_with_a_broken_profile_succeeds(tmp_path: Path) -> None:
    save_profile(tmp_path, PROFILE, gb_per_s=1.5).write_text("{")
    report = fastpersist.save({"epoch": 1}, tmp_path / "new.pt")
    assert (report.block_nbytes, report.queue_depth) == (8 << 20, 8)
    assert fastpersist.load(tmp_path / "new.pt") == {"epoch": 1}


def test_a_save_takes_the_profiles_engine(tmp_path: Path) -> None:
    save_profile(tmp_path, PROFILE, gb_per_s=1.5)
    assert fastpersist.save({"epoch": 1}, tmp_path / "new.pt").engine == "posix"
