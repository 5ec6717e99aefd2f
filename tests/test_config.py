"""Configuration: one clear error for every bad document, and precedence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bcg_dsa import environment
from sglang_bcg_dsa.config import FEATURES, Config, load
from sglang_bcg_dsa.errors import ConfigError


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "c.toml"
    file.write_text(text)
    return str(file)


def test_no_file_means_defaults() -> None:
    """Every feature is on "auto" without a file."""
    assert all(load(None).enabled(feature) == "auto" for feature in FEATURES)


def test_a_file_is_read(tmp_path: Path) -> None:
    """Settings arrive, and only those that were given change."""
    config = load(write(tmp_path, "[vote]\nenabled = false\n[audit]\nstall_seconds = 5\n"))
    assert config.enabled("vote") is False
    assert config.audit.stall_seconds == 5
    assert config.audit.exchange_seconds == Config().audit.exchange_seconds


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[vote]\nenabled = 1\n", 2, ["[vote]", "enabled", "1", 'true, false or "auto"']),
        ("\n\n[audit]\nstall_seconds = -1\n", 4, ["[audit]", "stall_seconds", "-1", ">"]),
        ("[audit]\nstall_seconds = 'x'\n", 2, ["[audit]", "stall_seconds", "'x'", "float"]),
        ("[audit]\nstal_seconds = 5\n", 2, ["[audit]", "stal_seconds", "unknown key", "stall_seconds"]),
        ("[vot]\nenabled = true\n", 1, ["[vot]", "unknown table", "vote"]),
        ("vote = 3\n", 1, ["[vote]", "3", "object"]),
        ("vote.enabled = 'on'\n", 1, ["[vote]", "enabled", "'on'"]),
    ],
)
def test_an_error_names_file_line_key_and_what_was_expected(
    tmp_path: Path, text: str, line: int, words: list[str]
) -> None:
    """A typo is found where it stands."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert f"{path}:{line}:" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p / "missing.toml", "no such file"),
        (lambda p: p, "is a directory"),
        (lambda p: _binary(p), "not text"),
        (lambda p: Path(write(p, "[vote\n")), "not TOML"),
        (lambda p: Path(write(p, "[vote]\n[vote]\n")), "not TOML"),
    ],
)
def test_a_file_that_is_no_document_is_one_error(tmp_path: Path, make: object, words: str) -> None:
    """Missing, a folder, binary or broken: each says which."""
    with pytest.raises(ConfigError) as caught:
        load(str(make(tmp_path)))  # type: ignore[operator]
    assert words in str(caught.value)


def _binary(folder: Path) -> Path:
    file = folder / "b.toml"
    file.write_bytes(b"\x80\x81\xff")
    return file


@given(st.binary(max_size=200))
def test_no_bytes_make_it_crash(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Whatever the file holds, the answer is a configuration or a ConfigError."""
    file = tmp_path_factory.mktemp("c") / "c.toml"
    file.write_bytes(content)
    try:
        assert isinstance(load(str(file)), Config)
    except ConfigError as error:
        assert str(file) in str(error)


@pytest.mark.parametrize(("value", "asked"), [("1", True), ("on", True), ("TRUE", True), ("0", False), ("", False)])
def test_the_environment_switch(monkeypatch: pytest.MonkeyPatch, value: str, asked: bool) -> None:
    """The usual words for yes and no."""
    monkeypatch.setenv(environment.ASKED, value)
    assert environment.asked() is asked


def test_a_switch_that_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """``SGLANG_BCG_DSA=banana`` is not silently off."""
    monkeypatch.setenv(environment.ASKED, "banana")
    with pytest.raises(ConfigError) as caught:
        environment.asked()
    assert "banana" in str(caught.value)


def test_errors_end_the_process_although_sglang_swallows_exceptions() -> None:
    """A StartupError is a SystemExit of status 2, not an Exception."""
    assert ConfigError("x").code == 2
    assert not isinstance(ConfigError("x"), Exception)
