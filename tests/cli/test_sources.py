"""Flag over environment over file over default; nothing unknown, nothing of the wrong type."""

import dataclasses

import pytest

from plait.platform.cli import table
from plait.platform.cli.asking_flags import ANSWER
from plait.platform.cli.settings import engine_options, server_settings
from plait.platform.cli.sources import Resolved, resolve
from plait.platform.config import Options
from plait.platform.core import SamplingParams
from plait.platform.errors import ConfigError
from plait.platform.server.settings import Limits, ServerSettings


def resolved(given=None, environ=None, file=None, flags=table.SERVE) -> Resolved:
    return resolve(flags, table.KNOWN, given=given or {}, environ=environ or {}, file=file)


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str):
        path = tmp_path / "plait.yaml"
        path.write_text(text)
        return path

    return write


def test_a_flag_goes_before_a_variable_before_a_file_before_the_default(yaml_file):
    file = yaml_file("port: 1\nhost: 127.0.0.2\nmax-model-len: 100\n")
    environ = {"PLAIT_PORT": "2", "PLAIT_HOST": "127.0.0.3", "HOME": "/"}
    flags = resolved({"port": "3"}, environ, file)
    assert flags["port"] == 3
    assert flags["host"] == "127.0.0.3"
    assert flags["max_model_len"] == 100
    assert flags["block_size"] == Options().block_size
    origins = [flags.origin(k) for k in ("port", "host", "max_model_len", "block_size")]
    assert origins == ["--port", "PLAIT_HOST", "max-model-len in plait.yaml", "default"]


def test_every_field_of_every_part_has_exactly_one_flag():
    filled = [(flag.part, flag.field) for flag in table.SERVE]
    assert len(filled) == len(set(filled))
    options = {f.name for f in dataclasses.fields(Options)}
    assert {field for part, field in filled if part is Options} == options
    # The served name is an option of the engine, which knows the model's own.
    settings = {f.name for f in dataclasses.fields(ServerSettings)}
    assert {field for part, field in filled if part is ServerSettings} == settings - {
        "limits",
        "grants",
        "served_model_name",
    }


def test_flag_names_are_unique_within_each_command():
    for flags in (
        table.SERVE,
        table.CHAT,
        table.COMPLETE,
        table.ENGINE,
        table.THROUGHPUT,
        table.BENCH_SERVE,
    ):
        keys = [flag.key for flag in flags]
        assert len(keys) == len(set(keys))


def test_sampling_flags_are_sampling_fields():
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    assert {f.field for f in ANSWER} - {"url", "api_key", "adapter"} <= fields


@pytest.mark.parametrize("name", ["max-model-len", "max_model_len"])
def test_a_file_may_spell_names_either_way(yaml_file, name):
    assert resolved(file=yaml_file(f"{name}: 64"))["max_model_len"] == 64


@pytest.mark.parametrize(
    ("text", "part_of_message"),
    [
        ("prot: 1", "prot in plait.yaml is no setting of plait. Did you mean port?"),
        ("port: abc", "port in plait.yaml wants a whole number, not 'abc'"),
        ("port: 1.5", "port in plait.yaml wants a whole number, not 1.5"),
        ("port: true", "wants a whole number, not true or false"),
        ("port: 70000", "at most 65535"),
        ("port:", "port in plait.yaml has no value"),
        ("port: [1]", "wants a whole number"),
        ("port: 1\nport: 2", "port is set twice"),
        ("max-model-len: 1\nmax_model_len: 2", "is set twice"),
        ("progress: maybe", "wants true or false, not 'maybe'"),
        ("dtype: float16", "one of auto, float32, bfloat16"),
        ("- port", "must hold `name: value` lines"),
        ("port: {", "is not valid YAML"),
        ("served-model-name: 7", "wants a text, not 7"),
    ],
)
def test_a_wrong_file_is_refused_by_name(yaml_file, text, part_of_message):
    with pytest.raises(ConfigError) as caught:
        resolved(file=yaml_file(text))
    assert part_of_message in caught.value.message


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read --config"):
        resolved(file=tmp_path / "none.yaml")


def test_an_unknown_variable_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean PLAIT_MAX_MODEL_LEN"):
        resolved(environ={"PLAIT_MAX_MODEL_LENGTH": "1"})


def test_variables_that_kubernetes_sets_for_a_service_named_plait_are_not_settings():
    environ = {
        "PLAIT_SERVICE_HOST": "10.0.0.1",
        "PLAIT_SERVICE_PORT": "8000",
        "PLAIT_SERVICE_PORT_HTTP": "8000",
        "PLAIT_PORT": "tcp://10.0.0.1:8000",
        "PLAIT_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PLAIT_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert resolved(environ=environ).values == {}


def test_settings_of_other_commands_are_allowed_and_not_used(yaml_file):
    file = yaml_file("temperature: 0.1\nport: 9\n")
    flags = resolved(environ={"PLAIT_REPEATS": "9"}, file=file)
    assert flags.values == {"port": 9}


def test_a_setting_of_another_command_is_still_checked():
    with pytest.raises(ConfigError, match="PLAIT_TEMPERATURE wants a number"):
        resolved(environ={"PLAIT_TEMPERATURE": "warm"})


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("off", False), ("No", False)]
)
def test_booleans_of_variables(text, value):
    assert resolved(environ={"PLAIT_ENABLE_PREFIX_CACHING": text})["enable_prefix_caching"] is value


def test_lists_from_every_source(yaml_file):
    file = yaml_file("api-key: [a, b]\n")
    assert resolved(file=file)["api_key"] == ("a", "b")
    assert resolved(environ={"PLAIT_API_KEY": "c, d"}, file=file)["api_key"] == ("c", "d")
    assert resolved({"api_key": ["e,f"]})["api_key"] == ("e,f",)
    sizes = resolved({"batch_size": ["1,8", "32"]}, flags=table.THROUGHPUT)
    assert sizes["batch_size"] == (1, 8, 32)


def test_a_secret_is_never_shown(yaml_file):
    with pytest.raises(ConfigError) as caught:
        resolved(file=yaml_file("api-key: [12345678]"))
    assert "12345678" not in caught.value.message


def test_parts_are_built_from_what_was_set():
    flags = resolved({"kv_cache_memory": "1.5GiB", "max_stop": "8", "max_num_seqs": "3"})
    options = engine_options(flags)
    assert options == Options(kv_cache_bytes=3 << 29, max_num_seqs=3)
    assert server_settings(flags).limits == Limits(stop=8)


def test_memory_by_size_and_by_share_exclude_each_other():
    flags = resolved({"kv_cache_memory": "1GiB"}, {"PLAIT_MEMORY_UTILIZATION": "0.5"})
    with pytest.raises(
        ConfigError, match=r"--kv-cache-memory and PLAIT_MEMORY_UTILIZATION both .* keep one"
    ):
        engine_options(flags)


def test_a_revision_of_a_local_model_is_refused(tmp_path):
    for model in ({}, {"model": str(tmp_path)}):
        with pytest.raises(ConfigError, match="--revision names a version"):
            engine_options(resolved({"revision": "main", **model}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "192.168.1.5", "myhost"])
def test_a_public_address_needs_a_key(host):
    with pytest.raises(ConfigError, match=r"there is no API key: set one with --api-key"):
        server_settings(resolved({"host": host}))
    assert server_settings(resolved({"host": host, "api_key": ["k"]})).api_keys == ("k",)
    assert server_settings(resolved({"host": host, "insecure_public": True})).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_loopback_address_needs_no_key(host):
    assert server_settings(resolved({"host": host})).api_keys == ()


def test_keys_of_flags_and_file_add_up(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# two of them\nb\n\n  c  \n")
    settings = server_settings(resolved({"api_key": ["a"], "api_key_file": str(file)}))
    assert settings.api_keys == ("a", "b", "c")


def test_a_key_file_without_a_key_is_refused(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        server_settings(resolved({"api_key_file": str(file)}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"uds": "/tmp/s", "port": "1"}, "--uds listens on a Unix socket, so --port has no effect"),
        ({"metrics_public": True}, "--metrics-public has no effect without API keys"),
        ({"api_key": [" "]}, "an API key is empty"),
    ],
)
def test_flags_without_effect_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        server_settings(resolved(given))
