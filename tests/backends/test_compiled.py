"""The compiled part is found where it was installed, copies as NumPy does, checks its callers."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace

import numpy as np
import pytest

from mpishare import native
from mpishare.memory.numbers import added_in_c
from mpishare.plans.cells import Cells, lower
from mpishare.plans.exchange.host.messages import add
from mpishare.plans.layout import FieldLayout
from tests.helpers.compiled import WHY_NONE, needs_compiled
from tests.helpers.wires import differ, hard, rounded

SO = "_host.abi3.so"


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the package's part, as in a clone of its own."""
    folder = tmp_path / "mpishare" / "native"
    shutil.copytree(
        Path(native.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__")
    )
    spec = importlib.util.spec_from_file_location("copied", folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "copied", module)
    spec.loader.exec_module(module)
    yield module, folder
    sys.modules.pop("copied._host", None)


@needs_compiled
def test_it_is_loaded_from_its_own_folder(copied):
    module, why = copied[0].load()
    assert not why
    assert Path(module.__file__) == copied[1] / SO


OLDER = "older than its sources"
WHY_NOT = {
    "not built": (
        "it was not built; in {} build it: python setup.py build_ext --inplace, or, where mpishare "
        "is installed, start Python in another folder"
    ),
    OLDER: "it is older than its sources; in {}",  # words may mean another thing
    "installed without a compiler": (
        "it was not built; install mpishare again where there are a C compiler and Python's headers"
    ),
    "rubbish": "_host.abi3.so: file too short; in {}",
}


@pytest.mark.parametrize(
    "what", [pytest.param(OLDER, marks=needs_compiled), *sorted({*WHY_NOT} - {OLDER})]
)
def test_one_that_cannot_be_loaded_is_said_to_be_so(copied, what):
    module, folder = copied
    if what == OLDER:
        later = (folder / SO).stat().st_mtime + 1
        os.utime(folder / "wait.h", (later, later))
    else:
        (folder / SO).unlink(missing_ok=True)
    if what == "installed without a compiler":
        for path in folder.glob("*.[ch]"):
            path.unlink()
    if what == "rubbish":
        (folder / SO).write_text("rubbish")
    loaded, why = module.load()
    assert loaded is None
    assert WHY_NOT[what].format(folder.parents[1]) in why


def test_a_python_without_a_gil(monkeypatch):
    monkeypatch.setattr(sys, "abiflags", "t")
    assert native.load.__wrapped__() == (
        None, "it would bring the GIL back to this Python, which has none"
    )  # fmt: skip


def test_a_choice_that_is_none(monkeypatch):
    monkeypatch.setenv("MPISHARE_HOST_CODE", "fast")
    with pytest.raises(ValueError, match=r"'fast' is neither 'python' nor 'compiled'"):
        native.choose()


@pytest.fixture(scope="module")
def module():
    if WHY_NONE:
        pytest.skip(WHY_NONE)
    return native.load()[0]


def of_field(copy):
    """A part of a field that is read or written where it is."""
    return 0, 0, None, None, None, copy, ()


def exchange_within(module, layout, words, copies, **others):
    """An exchange of a rank alone, whose cells go to places of the same field."""
    at = module.address_of(words)
    given = {
        "owner": None,
        "context": SimpleNamespace(windows_version=0),
        "agreement": SimpleNamespace(thread=get_ident()),
        "life": SimpleNamespace(failure=None),
        "recordings": [],
        "array_type": np.ndarray,
        "words": (at, at + 128, at + 256, at + 512),
        "fields": ((layout.dtype, layout.shape, layout.strides, layout.span_nbytes, False, None),),
        "receivers": (),
        "senders": ((0, at, at, 0, tuple(map(of_field, copies))),),
        "out": (),
        "adds": False,
        "is_reverse": False,
        "is_rounded": False,
        "nbytes": 1,
        "looks_per_yield": 1,
    }
    return module.Exchange(**given | others)


def layout_of(array):
    return FieldLayout(array.shape, array.strides, array.dtype, None)


def check_copy(module, array, to, source):
    """A part of an array is copied to another one as NumPy does."""
    layout, words, right = layout_of(array), np.zeros(128, "u8"), array.copy()
    right[to] = array[source]
    ends = Cells.of_key(layout, to), Cells.of_key(layout, source)
    copy = lower(*ends, array.itemsize, by=ends[0])
    exchange = exchange_within(module, layout, words, [copy])
    assert exchange.try_exchange((array,))
    assert array.tobytes() == right.tobytes()


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
        check_copy(module, array, to, source)


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "c16", "V24"])
@pytest.mark.parametrize("axis", [0, 1])
def test_places_in_runs_are_moved_run_by_run(module, dtype, axis):
    """Runs end where they end at either end; places that lie in other steps have none."""
    rng = np.random.default_rng(axis)
    nbytes = np.dtype(dtype).itemsize
    array = rng.integers(0, 255, (200, 200, nbytes), "u1").view(dtype)[..., 0]
    runs = [range(at, at + n) for at, n in ((3, 8), (50, 1), (11, 20), (80, 9))]
    places = np.concatenate([np.array(run) for run in runs])
    for to in (np.arange(100, 138), np.r_[100:105, 110:143]):
        keys = ((slice(None),) * axis + (each,) for each in (to, places))
        check_copy(module, array, *keys)
    layout = layout_of(array)
    whole, there = (Cells.of_key(layout, (slice(None),) * axis + (each,)) for each in (to, places))
    _, _, _, loops = lower(whole, there, nbytes, by=whole)
    count, *_, lengths = loops[-1]
    row = nbytes if axis else 200 * nbytes
    assert (np.frombuffer(lengths, "i8") == row * np.array([5, 3, 1, 20, 9])).all()
    assert count == 5
    apart = np.repeat(array, 2, axis=1)[:, ::2]
    check_copy(module, apart, *((slice(None),) * axis + (each,) for each in (to, places)))


NUMBERS = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "c8", "c16")


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("skew", [0, 1], ids=["aligned", "at odd addresses"])
def test_sums_are_those_of_numpy(module, dtype, skew):
    """Of boxes and of places, two at some of them, in their order; what is sent is zeroed."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng([dtype.itemsize, skew])
    for number in range(40):
        shape = (16, *map(int, rng.integers(1, 9, rng.integers(0, 3))))
        memory = np.zeros(dtype.itemsize * int(np.prod(shape)) + 1, "u1")
        array = np.ndarray(shape, dtype, memory, skew, order="CF"[number % 2])
        if dtype.kind in "iu":
            array[...] = rng.integers(0, 256, (*shape, dtype.itemsize), "u1").view(dtype)[..., 0]
        else:
            array[...] = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
        to, source = ((slice(0, 3),), (slice(4, 7),))
        if number % 4 > 1:
            to, source = (rng.integers(0, 3, 6),), (4 + rng.permutation(8)[:6],)
        if number % 8 == 7:  # in runs
            to, source = (np.tile(np.arange(4), 3),), (4 + np.arange(12),)
        right = array.copy()
        add(right, to, right[source])
        right[source] = 0
        layout, words = layout_of(array), np.zeros(128, "u8")
        ends = Cells.of_key(layout, to), Cells.of_key(layout, source)
        exchange = exchange_within(
            module,
            layout,
            words,
            [lower(*ends, dtype.itemsize, by=ends[0])],
            fields=((dtype, shape, array.strides, layout.span_nbytes, False, dtype.name),),
            adds=True,
            is_reverse=True,
        )
        assert exchange.try_exchange((array,))
        assert array.tobytes() == right.tobytes()


@pytest.mark.parametrize("skew", [0, 1], ids=["aligned", "at odd addresses"])
def test_doubles_that_go_through_floats(module, skew):
    """Of rows and of places, in runs and one by one."""
    numbers = hard(np.random.default_rng(skew), 16 * 9, "f8", "float32").reshape(16, 9)
    for to, source in ((slice(0, 4), slice(4, 8)), (np.array([2, 0, 1]), np.array([9, 8, 15]))):
        array = np.ndarray((16, 9), "f8", np.zeros(8 * 16 * 9 + 1, "u1"), skew)
        array[...] = numbers
        layout, words = layout_of(array), np.zeros(128, "u8")
        for columns in (slice(0, 9), slice(1, 9, 3)):
            keys = (to, columns), (source, columns)
            copy = lower(*(Cells.of_key(layout, key) for key in keys), 8, by=Cells.of_array(array))
            exchange = exchange_within(module, layout, words, [copy], is_rounded=True)
            assert exchange.try_exchange((array,))
            assert differ(array[keys[0]], rounded(numbers[keys[1]], "float32")) == 0
        assert differ(array[10:], numbers[10:]) == 0


def test_which_numbers_are_added(module):
    """The rest is NumPy's."""
    assert all(added_in_c(module, np.dtype(each)) == np.dtype(each).name for each in NUMBERS)
    for other in ("f2", "g", ">f8", ">i2", "?", "M8[s]", "V3", "f8,i4"):
        assert added_in_c(module, np.dtype(other)) is None


@pytest.mark.parametrize("shift", [0, 1, 17])
def test_long_runs_that_go_past_the_caches(module, shift):
    """Of 2 MiB and more, which begin and end anywhere."""
    count = (2 << 20) + 65
    array = np.random.default_rng(shift).integers(0, 255, 3 * count, "u1")
    to, source = slice(shift, shift + count), slice(2 * count - 3, 3 * count - 3)
    check_copy(module, array, (to,), (source,))


@pytest.mark.parametrize("nbytes", [2048, 2049, 5000, 70_000])
@pytest.mark.parametrize("behind", [-1, 0, 1, 16, 31, 32])
def test_targets_just_behind_the_source_modulo_a_page(module, behind, nbytes):
    """Runs one by one, at equal steps, and in large copies, none of which touches its neighbors."""
    count, step = 40, 18 * 4096
    rows = np.random.default_rng(nbytes).integers(0, 255, (2 * count, step), "u1")
    one = slice(0, 1), slice(count, count + 1)
    every = slice(0, count), slice(count, 2 * count)
    by_index = np.arange(count)[::-1], np.arange(count, 2 * count)
    for chosen, places in (one, every, by_index):
        to = chosen, slice(100 + behind, 100 + behind + nbytes)
        check_copy(module, rows, to, (places, slice(100, 100 + nbytes)))


@pytest.mark.parametrize("order", [(1, 2, 0), (0, 2, 1), (2, 1, 0)])
@pytest.mark.parametrize("nbytes", [1, 2, 3, 4, 8, 16])
def test_transposed_elements_of_more_than_a_tile(module, nbytes, order):
    """Either end may be the one in whose order they are moved."""
    shape, words = (300, 7, 290), np.zeros(128, "u8")
    array = np.random.default_rng(nbytes).bytes(2 * nbytes * 300 * 7 * 290)
    array = np.frombuffer(array, f"V{nbytes}").reshape(2, -1).copy()
    source, target = array[0].reshape(shape), array[1].reshape([shape[axis] for axis in order])
    ends = (
        Cells(target.nbytes, shape, target.transpose(np.argsort(order)).strides, {}),
        Cells.of_array(source),
    )
    right = source.transpose(order).copy()
    for by in ends:
        target[...] = np.zeros((), array.dtype)
        copy = lower(*ends, nbytes, by=by)
        assert exchange_within(module, layout_of(array), words, [copy]).try_exchange((array,))
        assert (target == right).all()
        assert (source.transpose(order) == right).all()


def test_cells_that_lie_together_are_one_run():
    layout = layout_of(np.zeros((4, 5, 6)))
    whole = Cells.of_key(layout, (slice(1, 3),))
    assert lower(whole, whole, 8, by=whole) == (2 * 5 * 6 * 8, 240, 240, ())
    face = Cells.of_key(layout, (slice(None), slice(1, 2)))
    assert lower(face, face, 8, by=face) == (48, 48, 48, ((4, 240, 240, None, None, None),))
    none = Cells.of_key(layout, (slice(2, 2),))
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
    agreement, life = SimpleNamespace(thread=get_ident()), SimpleNamespace(failure=None)
    recordings = []
    words = np.zeros(128, "u8")
    exchange = exchange_within(
        module, layout_of(field), words, [], agreement=agreement, life=life, recordings=recordings
    )
    assert exchange.try_exchange((field,))
    for of, name, value in ((life, "failure", int), (agreement, "thread", 0)):
        kept = getattr(of, name)
        setattr(of, name, value)
        assert not exchange.try_exchange((field,))
        setattr(of, name, kept)
    recordings.append(1)
    assert not exchange.try_exchange((field,))
    recordings.clear()
    assert exchange.try_exchange((field,))
    assert words[0] == exchange.epoch == 2  # what was refused has published nothing


def sum_of_two(module, count):
    """A sum on the first of two ranks; the words of both, and the slots of both in two uses."""
    memory = np.zeros(32 + 4 * -(-count // 16) * 16)
    words, slots = memory[:32].view("u8").reshape(2, 16), memory[32:].reshape(2, 2, -1)
    slots = slots[..., :count]
    made = module.Reduce("sum float64", np.ndarray, np.dtype("f8"), count, 2, 0, memory, 1)
    return made.reduce, words, slots


def test_a_sum_that_is_called_again_leaves_its_slot_alone(module):
    """The others may be reading it."""
    reduce, words, slots = sum_of_two(module, 1)
    field = np.array([3.0])
    assert reduce(field, 0, 4, False) == 4  # the other one has not come
    assert slots[0, 0] == 3
    slots[0] = [[70.0], [5.0]]  # a value that only a second copy would overwrite
    words[1, 0] = 4
    assert reduce(field, 0, 4, False) is None
    assert field == 75


def test_a_shared_sum_that_is_called_again_goes_on_where_it_was(module):
    count = 48  # doubles; rank 0 folds 16, which fill a slot of words
    reduce, words, slots = sum_of_two(module, count)
    field = np.full(count, 3.0)
    slots[0, 1] = 4
    assert reduce(field, 0, 4, True) == 4  # the other one has not come
    words[1, 0] = 4
    assert reduce(field, 0, 4, True) == 6  # nor has it folded its share
    assert (field[:16] == 7).all()
    assert (field[16:] == 3).all()
    assert (slots[0, 0] == field).all()
    slots[0, 1] = 8  # the share of rank 1 is a result by now, that of rank 0 is not read again
    words[1, 1] = 6
    assert reduce(field, 0, 4, True) is None
    assert (field[:16] == 7).all()
    assert (field[16:] == 8).all()


def test_a_handler_of_a_signal_makes_no_call_while_c_asks_python(module):
    """Python runs one where a function begins: its call would change what C is about to use."""

    class Owner:
        def locate(self, *_):
            asked.append((agreement.thread, exchange.try_exchange((array,))))
            return 0, 0, 0, 0

    array, words, asked = np.zeros(4), np.zeros(128, "u8"), []
    layout, agreement = layout_of(array), SimpleNamespace(thread=get_ident())
    field = layout.dtype, layout.shape, layout.strides, layout.span_nbytes, True, None
    others = {"owner": Owner(), "agreement": agreement, "fields": (field,)}
    exchange = exchange_within(module, layout, words, [], **others)
    assert exchange.try_exchange((array,))
    assert asked == [(False, False)]
    assert agreement.thread == get_ident()
