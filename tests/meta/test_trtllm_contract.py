"""trtllm_contract.json against the stubs, the stand-in, and TensorRT-LLM itself where it is installed.

One check (`wavepp_stage.engine.trtllm.contract`, the preflight of every load) serves all three. What is
renamed in a copy must be missed: otherwise the check would be one in name only.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.harness import tiny_models
from tests.harness.installed_package import PACKAGE, ROOT, STAND_IN, STUBS, installed
from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.trtllm import compat, contract
from wavepp_stage.engine.trtllm.plain import ExecutorArgs
from wavepp_stage.engine.trtllm.release import served_version

_SPEC = importlib.util.find_spec(PACKAGE)
_REAL = _SPEC is not None and STAND_IN not in Path(_SPEC.origin or "").parents
OLDEST = contract.read_contract()["oldest"]
PX = "_torch/pyexecutor"
MANAGER = f"{PX}/kv_cache/kv_cache_manager_v2"
CORE = "runtime/kv_cache_manager_v2"
RENAMES = {
    # what the preflight says: (file of the stand-in, file of the stubs, what is renamed in both)
    "ResourceManager.free_resources": (
        f"{PX}/resource_manager.py", f"{PX}/resource_manager.pyi", r"def free_resources"),
    "LlmRequest: no parameter cache_salt": (f"{PX}/llm_request.py", f"{PX}/llm_request.pyi", r"\bcache_salt(?=: str)"),
    "probe_prefix_match_length: no parameter cache_salt": (
        "_fake/cache_manager.py", f"{MANAGER}.pyi", r"\bcache_salt(?=: str)"),
    "capped claim: none of its ways is there": (
        f"{MANAGER}.py", f"{MANAGER}.pyi", r"\breuse_limit(?=: int)|def prepare_context(?=\()"),
    "ReuseScope: no parameter salt": (f"{CORE}/_common.py", f"{CORE}.pyi", r"\bsalt(?=: int)"),
    "TorchLlmArgs: no parameter pp_partition": (
        "llmapi/llm_args.py", "llmapi/llm_args.pyi", r"\bpp_partition(?=: list\[int\] \| None =)"),
    "KVCacheStoredData: no parameter parent_hash": (f"{CORE}/_event_manager.py", f"{CORE}.pyi", r"\bparent_hash(?=:)"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_DISABLE_MPI", "1")


def _misses() -> list[contract.Miss]:
    return list(contract.find_misses(contract.read_contract()))


def test_stubs_have_everything_when_compared_with_the_contract() -> None:
    with installed(STUBS, stubs=True):
        assert _misses() == []


@pytest.mark.parametrize("vintage", ["newer", "rc26"])
def test_stand_in_has_everything_when_compared_with_the_contract(
    vintage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attributes that only objects have are looked for on those of a real load."""
    monkeypatch.setenv("FAKE_TRTLLM_VINTAGE", vintage)
    folder = tiny_models.build("llama", tmp_path)
    with installed(STAND_IN):
        version = contract.preflight()
        assert ("rc26" in version) is (vintage == "rc26")
        executor = compat.make_executor(_args(folder))
        contract.check_loaded(compat.loaded_objects(executor))
        compat.close_executor(executor)


def test_objects_of_a_load_are_refused_when_an_attribute_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_models.build("llama", tmp_path)
    with installed(STAND_IN):
        executor = compat.make_executor(_args(folder))
        instances = compat.loaded_objects(executor)
        vars(executor.kv_cache_manager).pop("index_mapper")
        with pytest.raises(EngineFault, match=r"index_mapper: no such attribute"):
            contract.check_loaded(instances)
        compat.close_executor(executor)


@pytest.mark.skipif(not _REAL, reason="tensorrt-llm is not installed: compared with stubs and stand-in only")
def test_real_package_has_everything_when_it_is_installed() -> None:
    compat.prepare_process()
    assert _misses() == []


@pytest.mark.parametrize("kind", ["stand-in", "stubs"])
@pytest.mark.parametrize("said", RENAMES)
def test_preflight_names_it_when_a_name_or_parameter_is_renamed(kind: str, said: str, tmp_path: Path) -> None:
    own, stub, pattern = RENAMES[said]
    source, file = (STAND_IN, own) if kind == "stand-in" else (STUBS, stub)
    shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path / "copy" / PACKAGE / file
    text, count = re.subn(pattern, lambda found: f"{found[0]}_renamed", target.read_text())
    assert count
    target.write_text(text)
    with installed(tmp_path / "copy", stubs=kind == "stubs"):
        vars(importlib.import_module(PACKAGE))["__version__"] = OLDEST  # stubs tell none
        misses = _misses()
        with pytest.raises(EngineFault) as caught:
            contract.preflight()
    total = len(contract.read_contract()["entries"])
    assert said in contract.list_misses(misses)
    assert caught.value.message == (
        f"1 of the {total} names that the adapter uses are missing or changed in this {PACKAGE}: "
        f"{contract.list_misses(misses)}"
    )
    assert caught.value.fields == {"field": PACKAGE, "value": "1", "limit": "0"}


def test_preflight_lists_every_miss_once_when_the_package_has_no_names(tmp_path: Path) -> None:
    _package(tmp_path, f'__version__ = "{OLDEST}"')
    with installed(tmp_path), pytest.raises(EngineFault) as caught:
        contract.preflight()
    message = caught.value.message
    assert message.startswith(f"{caught.value.fields['value']} of the ")
    for name in ("create_py_executor", "KVCacheManagerV2", "LlmRequest", "sequence_to_blockchain_keys"):
        assert len(re.findall(rf"(?<=[ (]){name}(?=[,)])", message)) == 1, name
    assert message.count(f"{PACKAGE}._torch: not there") == 1


@pytest.mark.parametrize(
    ("source", "field", "value", "said"),
    [
        (None, PACKAGE, "not installed", "tensorrt-llm is not installed: pip install '.[trtllm]' in a checkout"),
        ('__version__ = "1.2.1"', f"{PACKAGE} version", "1.2.1", "tensorrt_llm 1.2.1 is not served: pip install"),
        ("", f"{PACKAGE} version", "None", "tensorrt_llm None is not served: pip install"),
        # a dependency whose name begins as the package's does is not the package
        ("import tensorrt_ll", PACKAGE, "broken",
         "tensorrt_llm is installed, but its import breaks: ModuleNotFoundError: No module named 'tensorrt_ll'"),
        ("raise ImportError('libnvinfer.so:\\n  not found')", PACKAGE, "broken",
         "tensorrt_llm is installed, but its import breaks: ImportError: libnvinfer.so: not found"),
        ("raise SystemExit(3)", PACKAGE, "broken", "tensorrt_llm is installed, but its import breaks: SystemExit: 3"),
    ],
)  # fmt: skip
def test_preflight_says_one_short_line_when_there_is_no_package_to_look_into(
    source: str | None, field: str, value: str, said: str, tmp_path: Path
) -> None:
    if source is not None:
        _package(tmp_path, source)
    with installed(tmp_path), pytest.MonkeyPatch.context() as patch:
        if source is None:
            patch.setitem(sys.modules, PACKAGE, None)  # not even where it is installed
        with pytest.raises(EngineFault) as caught:
            contract.preflight()
    assert said in caught.value.message
    assert len(caught.value.message) < 200
    assert "\n" not in caught.value.message
    assert caught.value.fields["field"] == field
    assert caught.value.fields["value"] == value
    assert caught.value.fields.get("limit") == (None if value == "broken" else f">={OLDEST}")


def test_preflight_says_the_cause_once_when_a_module_of_the_package_breaks(tmp_path: Path) -> None:
    _package(tmp_path, f'__version__ = "{OLDEST}"')
    _package(tmp_path / PACKAGE, "import no_such_dependency", "_torch")
    with installed(tmp_path), pytest.raises(EngineFault) as caught:
        contract.check_names({**contract.read_contract(), "entries": BELOW_TORCH})
    assert caught.value.message == (
        f"{PACKAGE}._torch is installed, but its import breaks: ModuleNotFoundError: No module named "
        "'no_such_dependency'"
    )


BELOW_TORCH = {f"{PACKAGE}._torch.{name}": {"kind": "value"} for name in ("one", "two.three")}


@pytest.mark.parametrize(
    "version",
    [
        "1.3.0rc26",
        "1.3.0rc26+fake",
        "1.3.0rc26.post1",
        "1.3.0rc27",
        "1.3.0rc100",
        "1.3.0",
        "1.3.1.dev3",
        "1.4.0a1",
        "2.0",
    ],
)
def test_version_is_served_when_it_is_the_oldest_or_newer(version: str) -> None:
    assert served_version(_versioned(version), contract.read_contract()) == version


@pytest.mark.parametrize(
    "version",
    ["1.2.1", "1.0.0", "1.3.0rc9", "1.3.0rc25.post9", "1.3.0rc26.dev1", "1.3.0b99", "1.3.0.dev20261129", "1.2.99+cu13",
     "main", "1.3.0rc26garbage", ""],
)  # fmt: skip
def test_version_is_refused_when_it_is_older_or_none(version: str) -> None:
    with pytest.raises(EngineFault) as caught:
        served_version(_versioned(version), contract.read_contract())
    assert caught.value.fields == {"field": f"{PACKAGE} version", "value": version, "limit": f">={OLDEST}"}


def test_extra_asks_for_what_is_served() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trtllm"]
    assert f"{contract.read_contract()['distribution']}>={OLDEST}" in asked


def test_contract_names_everything_when_the_adapter_uses_it() -> None:
    """No name of TensorRT-LLM stands anywhere but in compat.py, and each of its imports is in the contract."""
    adapter = ROOT / "stage_daemon" / "wavepp_stage"
    importing = [
        path.name
        for path in adapter.rglob("*.py")
        if re.search(rf"^\s*(from|import) {PACKAGE}\b", path.read_text(), re.MULTILINE)
    ]
    assert importing == ["compat.py"]
    entries: Mapping[str, Any] = contract.read_contract()["entries"]
    text = re.split(r"\nif TYPE_CHECKING:\n(?:    .*\n|\n)*", (adapter / "engine" / "trtllm" / "compat.py").read_text())
    imported = re.findall(rf"^\s*from ({PACKAGE}\S*) import (.+)$", "".join(text), re.MULTILINE)
    names = [f"{module}.{name.strip()}" for module, list_ in imported for name in list_.split(",")]
    assert names
    assert [name for name in names if not any(entry == name or entry.startswith(f"{name}.") for entry in entries)] == []


def _versioned(version: str) -> ModuleType:
    module = ModuleType(PACKAGE)
    vars(module)["__version__"] = version
    return module


def _package(folder: Path, source: str, name: str = PACKAGE) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(f"{source}\n")


def _args(folder: Path) -> ExecutorArgs:
    return ExecutorArgs(
        model=str(folder),
        layers_per_stage=(tiny_models.LAYERS,),
        ranks=1,
        pool_blocks=16,
        block_tokens=16,
        host_bytes=0,
        lanes=2,
        wave_tokens=64,
        window=128,
        dtype="float32",
        events=100,
    )
