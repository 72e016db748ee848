"""Settings: precedence, sources, and every wrong key named where it was written."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import yaml

from wicore_trt.config import ENV_OTHER, KEYS, Flag, KVSettings, Settings, load_settings, parse_bytes, resolve_settings
from wicore_trt.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [n for n in os.environ if n.startswith("WICORE_")]:
        monkeypatch.delenv(name)


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_names_of_a_model_are_parted_by_commas(monkeypatch) -> None:
    assert load_settings(None, {"model.name": Flag("--name", "a/b, gpt-5-codex")}).model.name == ("a/b", "gpt-5-codex")
    monkeypatch.setenv("WICORE_MODEL__NAME", "one")
    assert load_settings().model.name == ("one",)


def test_the_tree_stays_small() -> None:
    assert len(KEYS) <= 69
    assert load_settings() == Settings()


def test_every_setting_is_described() -> None:
    from dataclasses import is_dataclass

    sections = [type(v) for v in vars(Settings()).values() if is_dataclass(v)]
    for section in (Settings, *sections):
        for name, info in section.__pydantic_fields__.items():
            assert info.description or name in vars(Settings()), f"{section.__name__}.{name} has no docstring"


@pytest.mark.parametrize("given", [c for n in range(4) for c in itertools.combinations(("recipe", "env", "flag"), n)])
def test_precedence(tmp_path: Path, given: tuple[str, ...]) -> None:
    """flag > env > recipe > default, for every combination; a neighbour in the same section keeps its own source."""
    path = recipe(tmp_path, "server:\n  grace_s: 7\n" + ("  port: 1001\n" if "recipe" in given else ""))
    environ = {"WICORE_SERVER__PORT": "1002"} if "env" in given else {}
    flags = {"server.port": Flag("--port", 1003 if "flag" in given else None)}
    loaded = resolve_settings(path, flags, environ)
    expected = {"recipe": 1001, "env": 1002, "flag": 1003}[given[-1]] if given else 50051
    assert loaded.settings.server.port == expected
    assert loaded.settings.server.grace_s == 7
    rows = {key: (value, source) for key, value, source in loaded.rows()}
    sources = {"recipe": f"recipe {path}:3", "env": "env WICORE_SERVER__PORT", "flag": "--port"}
    assert rows["server.port"] == (expected, sources[given[-1]] if given else "default")
    assert rows["server.grace_s"] == (7.0, f"recipe {path}:2")
    assert rows["server.host"] == ("127.0.0.1", "default")


def test_nested_and_dotted_flags_are_the_same() -> None:
    nested = load_settings(None, {"kv": {"page_tokens": 16}, "engine": "e"})
    assert nested == load_settings(None, {"kv.page_tokens": 16, "engine": "e"})


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("kv:\n  page_tokens: 16\n  device_bites: 1\n", 3, "kv.device_bites is not a setting. Did you mean"),
        ("servre:\n  port: 1\n", 1, "servre is not a setting"),
        ("kv:\n  page_tokens: many\n", 2, "kv.page_tokens"),
        ("kv:\n  device_bytes: 2 potatoes\n", 2, "not a size"),
        ("kv:\n  page_tokens: 16\n  page_tokens: 32\n", 3, "given twice"),
        ("kv: 3\n", 1, "section 'kv' must be a mapping"),
        ("- kv\n", 1, "a recipe must be a mapping"),
        ("kv:\n  page_tokens: {a: 1}\n", 2, "takes a value"),
        ("log:\n  level: loud\n", 2, "log.level"),
        ("server:\n  port: 70000\n", 2, "server.port"),
        ("server:\n  host: a\n  port: [1\n", 4, "expected"),
        ("kv:\n\tpage_tokens: 1\n", 2, "cannot start any token"),
        ("engine: !!python/object:os.system x\n", 1, "could not determine a constructor"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("kv: &loop\n  page_tokens: *loop\n", 2, "takes a value"),
        ("engine: a\n---\nengine: b\n", 2, "but found another document"),
        ("server:\n  tls_cert: a.pem\n", 2, "go together"),
        ("? [kv]\n: 1\n", 1, "is not a setting"),
    ],
)
def test_recipe_errors_name_file_and_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = recipe(tmp_path, text)
    message = refused(path)
    assert f"{path}:{line}:" in message and words in message, message


def test_unreadable_recipes(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xff\xfe\xff")
    assert "cannot be read" in refused(path)
    path.write_bytes(b"engine: a\0b\n")
    assert str(path) in refused(path)
    assert "does not exist" in refused(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="Did you mean.*gemma3-270m-cpu"):
        load_settings("gemma3-270m-gpu")


def test_empty_recipe_and_null_are_defaults(tmp_path: Path) -> None:
    assert load_settings(recipe(tmp_path, "")) == Settings()
    assert load_settings(recipe(tmp_path, "# nothing\nengine: null\n")) == Settings()


@pytest.mark.parametrize("name", ["WICORE_KV__PAGE_TOKEN", "WICORE_PORT", "WICORE_KV", "WICORE_"])
def test_unknown_variables_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"environment variable {name} is not a setting"):
        resolve_settings(environ={name: "1"})
    with pytest.raises(ConfigError, match="Did you mean.*WICORE_KV__PAGE_TOKENS"):
        resolve_settings(environ={"WICORE_KV__PAGE_TOKEN": "1"})


def test_bad_variable_and_flag_values_are_named() -> None:
    with pytest.raises(ConfigError, match="env WICORE_SERVER__PORT: server.port: .*integer"):
        resolve_settings(environ={"WICORE_SERVER__PORT": "http"})
    with pytest.raises(ConfigError, match="^--port: Input should be"):
        resolve_settings(None, {"server.port": Flag("--port", -1)})
    with pytest.raises(ConfigError, match="argument: server.port: Input should be"):
        resolve_settings(None, {"server.port": -1})
    with pytest.raises(ConfigError, match="prot is not a setting. Did you mean server.port"):
        resolve_settings(None, {"server.prot": 1})
    with pytest.raises(ConfigError, match="api_key"):
        resolve_settings(environ={"WICORE_SERVER__API_KEY": ""})  # an empty key must not mean "no key needed"


def test_tiers_without_a_prefix_cache_are_refused_where_they_are_written(tmp_path: Path) -> None:
    path = recipe(tmp_path, "kv:\n  host_bytes: 1GiB\n  disk_path: d\n")
    assert load_settings(path).kv.host_bytes == 1 << 30
    with pytest.raises(ConfigError, match=f"{path}:2: kv: host_bytes needs prefix_cache"):
        resolve_settings(path, environ={"WICORE_KV__PREFIX_CACHE": "false"})
    off = {"kv.prefix_cache": False, "kv.host_bytes": 0, "kv.disk_path": None}
    with pytest.raises(ConfigError, match="disk_path needs host_bytes"):
        resolve_settings(path, off)
    assert resolve_settings(None, off).settings.kv == KVSettings(prefix_cache=False)


def test_one_gpu_for_two_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="env WICORE_EXECUTOR__DEVICES: .*devices names one GPU twice: 1,0,1"):
        resolve_settings(environ={"WICORE_EXECUTOR__DEVICES": "1,0,1"})


def test_variables_of_a_kubernetes_service_pass_and_others_do_not() -> None:
    address = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "80", "SERVICE_PORT_GRPC": "80", "PORT": "tcp://10.0.0.1:80"}
    address |= {f"PORT_80_TCP{end}": "10.0.0.1" for end in ("", "_PROTO", "_PORT", "_ADDR")}
    resolve_settings(environ={f"WICORE_{name}": value for name, value in address.items()})
    resolve_settings(environ={f"WICORE_GRPC_{name}": value for name, value in address.items()})
    for name in ("WICORE_PORT", "WICORE_SERVER_PORT"):
        with pytest.raises(ConfigError, match=f"{name} is not a setting"):
            resolve_settings(environ={name: "80"})


def test_variables_that_are_not_settings_pass() -> None:
    resolve_settings(environ={"PATH": "/", "HF_TOKEN": "x", **dict.fromkeys(ENV_OTHER, "1")})


def test_variable_types() -> None:
    environ = {
        "WICORE_KV__PREFIX_CACHE": "false",
        "WICORE_KV__DEVICE_BYTES": "1.5GiB",
        "WICORE_BUILD__TARGETS": "sm_89, sm_90",
        "WICORE_LOG__JSON": "1",
        "WICORE_ENGINE": "here",
    }
    settings = resolve_settings(environ=environ).settings
    assert settings.kv.prefix_cache is False
    assert settings.kv.device_bytes == 3 << 29
    assert settings.build.targets == ("sm_89", "sm_90")
    assert settings.log.json is True
    assert settings.engine == "here"


def test_the_removed_number_of_fronts_is_refused_wherever_it_is_written(tmp_path: Path, monkeypatch) -> None:
    says = "Remove it: a server has one front."
    assert refused(recipe(tmp_path, "server:\n  fronts: 2\n")).endswith(
        f"r.yaml:2: server.fronts is not a setting. {says}"
    )
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {"server.fronts": Flag("--fronts", 2)})
    assert str(caught.value) == f"server.fronts is not a setting. {says}" and caught.value.exit_code == 3
    monkeypatch.setenv("WICORE_SERVER__FRONTS", "2")
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert str(caught.value) == f"environment variable WICORE_SERVER__FRONTS is not a setting. {says}"


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("2GiB", 2 << 30), ("2 GB", 2 * 10**9), ("0.5KiB", 512), ("3TiB", 3 << 40), ("7B", 7)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "1 gigabyte", "-1GiB", "1e9", "0x10", "nan", "1GiB2"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        resolve_settings(None, {"kv.device_bytes": text})


def test_printed_settings_are_a_recipe_and_hide_the_key(tmp_path: Path) -> None:
    flags = {"server.api_key": "hunter2", "kv.device_bytes": "3GiB", "build.targets": ["sm_90"], "engine": "a: b # c"}
    loaded = resolve_settings(None, flags, {})
    text = loaded.render()
    assert "hunter2" not in text and '"***"  # argument' in text
    again = load_settings(recipe(tmp_path, text), {"server.api_key": "hunter2"})
    assert again == loaded.settings


@pytest.mark.parametrize("seed", range(20))
def test_random_documents_never_escape_as_other_errors(tmp_path: Path, seed: int) -> None:
    """Whatever the text, the outcome is settings or a ConfigError."""
    rng = random.Random(seed)
    base = yaml.safe_dump({"kv": {"page_tokens": 16}, "server": {"port": 1, "host": "h"}, "engine": "e"})
    for _ in range(25):
        text = list(base)
        for _ in range(rng.randrange(1, 6)):
            text[rng.randrange(len(text))] = rng.choice("\t\n :-[]{}&*!|>'\"%@`?#,0aé\x07")
        try:
            load_settings(recipe(tmp_path, "".join(text)))
        except ConfigError:
            continue
