"""bfloat16 on a CPU that advertises AMX and does not permit it."""

import os
import signal

import pytest

from rloom import cpu_bfloat16 as cpu


@pytest.fixture
def machine(monkeypatch):
    """A machine on which products die unless oneDNN is held to one of the instruction sets given."""

    def make(works, amx=True, preset=None):
        asked = []

        class Done:
            returncode = 0

        def run(command, env, **options):
            asked.append(env.get(cpu.VARIABLE))
            done = Done()
            done.returncode = 0 if env.get(cpu.VARIABLE) in works else -signal.SIGILL
            return done

        monkeypatch.delenv(cpu.VARIABLE, raising=False)
        if preset:
            monkeypatch.setenv(cpu.VARIABLE, preset)
        monkeypatch.setattr(cpu, "_advertises_amx", lambda: amx)
        monkeypatch.setattr(cpu.subprocess, "run", run)
        cpu.make_bfloat16_safe.cache_clear()
        cpu.make_bfloat16_safe()
        found = os.environ.pop(cpu.VARIABLE, None)
        cpu.make_bfloat16_safe.cache_clear()
        return found, asked

    return make


def test_a_machine_that_keeps_its_promise_is_left_alone(machine):
    assert machine(works=[None]) == (None, [None])


def test_onednn_is_held_to_what_works(machine):
    assert machine(works=["AVX512_CORE_BF16"]) == ("AVX512_CORE_BF16", [None, "AVX512_CORE_BF16"])
    assert machine(works=["AVX512_CORE"])[0] == "AVX512_CORE"


def test_nothing_that_works_is_said(machine, caplog):
    assert machine(works=[])[0] is None
    assert "use float32" in caplog.text


def test_without_amx_nothing_is_tried(machine):
    assert machine(works=[], amx=False) == (None, [])


def test_what_was_set_stays(machine):
    assert machine(works=[], preset="AVX2") == ("AVX2", [])


def test_amx_is_read_from_the_flags(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("flags : sse avx512_bf16 amx_bf16 amx_tile")
    assert cpu._advertises_amx(info)
    info.write_text("flags : sse avx512_bf16")
    assert not cpu._advertises_amx(info)
    assert not cpu._advertises_amx(tmp_path / "none")


def test_the_product_runs_in_a_process_of_its_own(monkeypatch):
    assert not cpu._dies({})  # the tests themselves were started so that it works
    monkeypatch.setattr(cpu, "PRODUCT", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert cpu._dies({})
