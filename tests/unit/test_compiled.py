"""The compiled part is built once, by whatever compiler there is, and copies as NumPy does."""

import os
import shutil
import subprocess
import sys
from threading import get_ident
from types import SimpleNamespace

import numpy as np
import pytest

from mpishare.compiled import builder as of_build
from mpishare.compiled.builder import BuildError, build, load, wanted
from mpishare.halo.host.lowering import cells_of, lower
from mpishare.halo.layout import FieldLayout
from tests.helpers.launch import ROOT

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


OPTIMIZED = of_build._FLAGS
QUICK = (*OPTIMIZED, "-O0")  # the last one counts: a third of the time


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, for builds that are quick: how they are kept is the same for all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(of_build, "_FLAGS", QUICK)
    return tmp_path / "mpishare"


def fake_compiler(tmp_path, text):
    path = tmp_path / "fake-cc"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# --- building


@needs_compiler
def test_it_is_built_once_without_a_warning(cache, monkeypatch):
    monkeypatch.setattr(of_build, "_FLAGS", (*OPTIMIZED, "-Werror"))
    path = build()
    made = path.stat().st_mtime_ns
    assert build() == path
    assert path.stat().st_mtime_ns == made
    assert [each.name for each in cache.iterdir()] == [path.name]  # nothing else is left
    assert load(str(path)) is load(str(path))


@needs_compiler
def test_another_compiler_is_another_build(cache, monkeypatch):
    path = build()
    monkeypatch.setattr(of_build, "_FLAGS", (*QUICK, "-DANOTHER"))
    assert build() != path


@needs_compiler
def test_processes_that_build_at_once(cache):
    """Leaders of several nodes share a home: each builds, and none finds half a module."""
    program = (
        "from mpishare.compiled import builder\n"
        f"builder._FLAGS = {QUICK}\n"
        "builder.load(str(builder.build()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [each.wait(60) for each in running] == [0, 0]


def test_without_a_compiler(cache, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(BuildError, match=r"no-such-compiler: No such file"):
        build()


def without_its_own(patch, name):
    """Pretend that Python was built by a compiler of this name."""
    known = of_build.sysconfig.get_config_var
    patch.setattr(
        of_build.sysconfig, "get_config_var", lambda key: name if key == "CC" else known(key)
    )


@needs_compiler
@pytest.mark.parametrize("of_python", ["", "compiler-of-another-machine"])
def test_a_node_without_a_compiler_takes_what_another_has_built(cache, monkeypatch, of_python):
    monkeypatch.delenv("CC", raising=False)
    if of_python:
        without_its_own(monkeypatch, of_python)
    path = build()
    monkeypatch.setenv("PATH", str(cache))
    assert build() == path


@needs_compiler
def test_a_node_with_a_compiler_takes_no_build_of_another(cache, monkeypatch):
    """It may want libraries, or a CPU, that are on the other node alone."""
    own = of_build.sysconfig.get_config_var("CC")
    if shutil.which(own.split()[0]) is None:
        pytest.skip(f"{own} is not here")
    monkeypatch.delenv("CC", raising=False)
    with monkeypatch.context() as patch:
        without_its_own(patch, "compiler-of-another-machine")
        by_cc = build()
    assert build() != by_cc


@pytest.mark.parametrize("to", ["2", "1"], ids=["stderr", "stdout"])
def test_the_words_of_a_compiler_that_fails(cache, monkeypatch, tmp_path, to):
    text = f"echo 'note: so far' >&{to}; echo 'module.c:3: error: no luck' >&{to}; exit 1"
    monkeypatch.setenv("CC", fake_compiler(tmp_path, text))
    with pytest.raises(BuildError, match=r"fake-cc failed: module.c:3: error: no luck"):
        build()
    assert not list(cache.iterdir())


def test_a_compiler_that_fails_without_a_word(cache, monkeypatch):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(BuildError, match=r"^false failed with exit status 1 and no output$"):
        build()


def test_a_compiler_that_takes_too_long(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", fake_compiler(tmp_path, "exec sleep 60"))
    with pytest.raises(BuildError, match=r"did not end within 0.2 s"):
        build(0.2)
    assert not list(cache.iterdir())


def test_a_compiler_that_makes_rubbish(cache, monkeypatch, tmp_path):
    text = 'while [ "$1" != -o ]; do shift; done; echo rubbish >"$2"'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, text))
    with pytest.raises(BuildError, match=r"rubbish|invalid ELF|file too short"):
        load(str(build()))


def test_without_headers(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(of_build.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BuildError, match=r"headers are not installed"):
        build()


def test_a_cache_that_others_can_write(cache):
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(BuildError, match=r"can be written by other users"):
        build()


def test_a_cache_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"cannot be made: Not a directory"):
        build()


def test_a_cache_in_the_working_directory(monkeypatch, tmp_path):
    """The other ranks, which load what one of them has built, may be in other directories."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert of_build._cache_folder() == tmp_path / "cache" / "mpishare"


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def expanduser(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(of_build.Path, "expanduser", expanduser)
    with pytest.raises(BuildError, match=r"no place for a cache: Could not determine"):
        build()


def test_no_home_is_made_for_the_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    with pytest.raises(BuildError, match=r"the home .*nobody is not there"):
        of_build._cache_folder()
    assert not (tmp_path / "nobody").exists()
    (tmp_path / "nobody").mkdir()
    assert of_build._cache_folder() == tmp_path / "nobody" / ".cache" / "mpishare"


@pytest.mark.parametrize("given", ["cc '-DX", "'"])
def test_a_command_of_a_compiler_with_an_open_quotation(cache, monkeypatch, given):
    monkeypatch.setenv("CC", given)
    with pytest.raises(BuildError, match=r"^CC=.*No closing quotation"):
        build()


def test_a_compiler_that_does_not_speak_utf8(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", fake_compiler(tmp_path, r"printf 'error: d\351sol\351\n' >&2; exit 1"))
    with pytest.raises(BuildError, match=r"fake-cc failed: error: d.sol."):
        build()


def test_a_compiler_that_makes_nothing(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", fake_compiler(tmp_path, "exit 0"))
    with pytest.raises(BuildError, match=r"module.so: No such file"):
        build()


@needs_compiler
def test_where_the_compiler_of_python_is_not_there(cache, monkeypatch):
    """Pythons that were built elsewhere name one of that machine."""
    known = of_build.sysconfig.get_config_var
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(
        of_build.sysconfig, "get_config_var", lambda n: "no-such-cc -O" if n == "CC" else known(n)
    )
    assert load(str(build()))


def test_a_module_that_another_rank_alone_has(tmp_path):
    """As where ranks are in containers of their own."""
    with pytest.raises(BuildError, match=r"No such file"):
        load(str(tmp_path / "cache" / "module.so"))
    with pytest.raises(BuildError, match=r"No such file"):
        load(str(tmp_path / "module.so"))


@needs_compiler
@pytest.mark.parametrize("kept", [0, 3000, -1])
def test_half_a_module_is_built_again(cache, kept):
    """A node that went down left it; the loader would die of a signal."""
    path = build()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BuildError, match=r"not whole"):
        load(str(path))
    assert load(str(build()))


@needs_compiler
def test_a_module_that_others_can_write(cache):
    """Its folder was there before, and everybody may look into it."""
    cache.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        path = build()
    finally:
        os.umask(before)
    assert not path.stat().st_mode & 0o077
    path.chmod(0o777)
    with pytest.raises(BuildError, match=r"can be written by other users"):
        load(str(path))


def test_a_python_without_a_gil(cache, monkeypatch):
    monkeypatch.setattr(of_build.sysconfig, "get_config_var", lambda name: 1)
    with pytest.raises(BuildError, match=r"bring the GIL back"):
        build()


def test_a_choice_that_is_none(monkeypatch):
    monkeypatch.setenv("MPISHARE_HOST_CODE", "fast")
    with pytest.raises(ValueError, match=r"'fast' is neither 'python' nor 'compiled'"):
        wanted()


# --- copies


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return load(str(build()))


def exchange_within(module, layout, words, copies):
    """An exchange of a rank alone, whose cells go to places of the same field."""
    at = module.address_of(words)
    return module.Exchange(
        owner=None,
        context=SimpleNamespace(windows_version=0),
        agreement=SimpleNamespace(failure=None, thread=get_ident()),
        recordings=[],
        array_type=np.ndarray,
        words=(at, at + 128, at + 256, at + 512),
        fields=((layout.dtype, layout.shape, layout.strides, layout.span_nbytes, False),),
        receivers=(),
        senders=(),
        out=(),
        own=tuple((0, None, None, None, copy, ()) for copy in copies),
        nbytes=1,
        looks_per_yield=1,
    )


def layout_of(array):
    return FieldLayout(array.shape, array.strides, array.dtype, None)


def random_keys(rng, shape, axis):
    """A box and another one beside it; on one axis perhaps of places in any order."""
    to, source = [], []
    for number, extent in enumerate(shape):
        count = int(rng.integers(1, extent // 2 + 1 if number == axis else extent + 1))
        first = int(
            rng.integers(0, extent // 2 - count + 1 if number == axis else extent - count + 1)
        )
        second = first + extent // 2 if number == axis else first
        to.append(slice(first, first + count))
        source.append(slice(second, second + count))
    return tuple(to), tuple(source)


@pytest.mark.parametrize("dtype", ["u1", "i2", "V3", "f4", "f8", "c16", "V24", "V40"])
def test_copies_are_those_of_numpy(module, dtype):
    rng = np.random.default_rng(len(dtype))
    words = np.zeros(128, "u8")
    for _ in range(60):
        ndim = int(rng.integers(1, 5))
        axis = int(rng.integers(ndim))
        shape = [int(each) for each in rng.integers(1, 7, ndim)]
        shape[axis] += 2
        order = rng.permutation(ndim)
        nbytes = np.dtype(dtype).itemsize
        base = rng.integers(0, 255, (*(shape[at] + 1 for at in order), nbytes), "u1")
        array = base.view(dtype)[..., 0].transpose(np.argsort(order))
        array = array[tuple(slice(0, extent) for extent in shape)]
        to, source = random_keys(rng, shape, axis)
        if rng.integers(2):  # as plans of neighbors name them
            to = tuple(slice(None) for _ in range(axis))
            source = to
            chosen = rng.permutation(shape[axis])
            half = shape[axis] // 2
            to, source = (*to, chosen[:half]), (*source, chosen[half : 2 * half] - shape[axis])
        layout = layout_of(array)
        ends = cells_of(layout, to), cells_of(layout, source)
        right = array.copy()
        right[to] = array[source]
        copy = lower(*ends, nbytes, by=ends[0])
        exchange = exchange_within(module, layout, words, [copy])
        assert exchange.try_exchange((array,))
        assert array.tobytes() == right.tobytes()


@pytest.mark.parametrize("shift", [0, 1, 17])
def test_long_runs_that_go_past_the_caches(module, shift):
    """Of 2 MiB and more, which begin and end anywhere."""
    count = (2 << 20) + 65
    words = np.zeros(128, "u8")
    array = np.random.default_rng(shift).integers(0, 255, 3 * count, "u1")
    to, source = slice(shift, shift + count), slice(2 * count - 3, 3 * count - 3)
    right = array.copy()
    right[to] = array[source]
    layout = layout_of(array)
    ends = cells_of(layout, (to,)), cells_of(layout, (source,))
    exchange = exchange_within(module, layout, words, [lower(*ends, 1, by=ends[0])])
    assert exchange.try_exchange((array,))
    assert (array == right).all()


def test_cells_that_lie_together_are_one_run():
    layout = layout_of(np.zeros((4, 5, 6)))
    whole = cells_of(layout, (slice(1, 3),))
    assert lower(whole, whole, 8, by=whole) == (2 * 5 * 6 * 8, 240, 240, ())
    face = cells_of(layout, (slice(None), slice(1, 2)))
    assert lower(face, face, 8, by=face) == (48, 48, 48, ((4, 240, 240, None, None),))
    none = cells_of(layout, (slice(2, 2),))
    assert lower(none, none, 8, by=none) is None


def test_what_is_not_of_the_layout_is_left_to_python(module):
    field = np.zeros((3, 4))
    words = np.zeros(128, "u8")
    exchange = exchange_within(module, layout_of(field), words, [])
    assert exchange.try_exchange([field])
    assert exchange.try_exchange((np.empty((3, 4)),))
    read_only = np.zeros((3, 4))
    read_only.flags.writeable = False
    unfit = [
        np.zeros((4, 3)), np.zeros((3, 4), "f4"), np.zeros((3, 8))[:, ::2], read_only,
        np.zeros((3, 4)).view(type("Mine", (np.ndarray,), {})), None, [[0.0] * 4] * 3,
    ]  # fmt: skip
    for each in unfit:
        assert not exchange.try_exchange((each,))
    for fields in ((), (field, field), field, None):
        assert not exchange.try_exchange(fields)


def test_a_broken_node_another_thread_and_a_capture_are_left_to_python(module):
    field = np.zeros(3)
    agreement = SimpleNamespace(failure=None, thread=get_ident())
    recordings = []
    words = np.zeros(128, "u8")
    at = module.address_of(words)
    exchange = module.Exchange(
        owner=None, context=None, agreement=agreement, recordings=recordings,
        array_type=np.ndarray, words=(at, at + 128, at + 256, at + 512),
        fields=((field.dtype, field.shape, field.strides, field.nbytes, False),),
        receivers=(), senders=(),
        out=(), own=(), nbytes=1, looks_per_yield=1,
    )  # fmt: skip
    assert exchange.try_exchange((field,))
    for name, value in (("failure", int), ("thread", 0)):
        kept = getattr(agreement, name)
        setattr(agreement, name, value)
        assert not exchange.try_exchange((field,))
        setattr(agreement, name, kept)
    recordings.append(1)
    assert not exchange.try_exchange((field,))
    recordings.clear()
    assert exchange.try_exchange((field,))
    assert words[0] == exchange.epoch == 2  # what was refused has published nothing


def test_a_sum_that_is_called_again_leaves_its_slot_alone(module):
    """The others may be reading it."""
    words, slots = np.zeros((2, 16), "u8"), np.zeros((2, 2, 1))
    control, even, odd = ([module.address_of(each) for each in part] for part in (words, *slots))
    reduce = module.Reduce("sum float64", 1, 0, control, even, odd, 1).reduce
    field = np.array([3.0])
    assert not reduce(field, 0, 2, 4)  # the other one has not come
    assert slots[0, 0] == 3
    slots[0] = [[70.0], [5.0]]  # a value that only a second copy would overwrite
    words[1, 0] = 4
    assert reduce(field, 0, 2, 4)
    assert field == 75
