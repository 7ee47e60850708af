"""GPU windows that a C program opens by one line of text."""

import pytest

from mpishare import UnsupportedError
from tests.helpers.c_program import LANGUAGES, compile_program, run_program
from tests.helpers.nvcc import find_cuda_include
from tests.windows import test_in_place_gpu as makers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_cuda_include() is None, reason="there is no cuda.h"),
]
N = 1000  # float64 elements


@pytest.fixture(scope="module", params=LANGUAGES)
def program(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    return compile_program(folder, request.param, with_cuda=True)


def check(node, program, win):
    import cupy

    win.array[...] = 1 + node.rank
    win.fence()
    node.synchronize()
    node.barrier()
    right = (node.rank + 1) % node.size
    gpus = {member.device.uuid for member in node.report().members}
    if cupy.cuda.runtime.getDeviceCount() < len(gpus):  # a program sees what its rank sees
        found = run_program(program, win.export(right))
        assert found == (1, "19: its GPU is hidden from here")
        right = node.rank
    assert run_program(program, win.export(right)) == (0, str(N * (1 + right)))
    node.barrier()
    assert run_program(program, win.export(right), "write")[0] == 0
    node.barrier()
    assert (win.array.get() == 2 + node.rank).all()
    node.barrier()


def test_what_mpishare_allocated(node, program):
    with node.allocate_each(N, "f8") as win:
        assert win.export().kind == "cuda-ipc"
        check(node, program, win)


@pytest.mark.parametrize("way", ["by_cupy", "inside_a_block", "by_pool"])
def test_what_was_shared_in_place(node, program, way):
    words = makers.as_cupy(getattr(makers, way)(2 * N + 1))  # of 4 bytes
    first = words.data.ptr // 4 % 2  # where a float64 may begin
    array = words[first : first + 2 * N].view("f8")
    with node.share_each(array, copy=False) as win:
        assert win.export().kind == ("cuda-fd" if way == "by_pool" else "cuda-ipc")
        check(node, program, win)


def test_chunks_are_refused(node):
    with (
        node.share_each(makers.by_torch_expandable(), copy=False) as win,
        pytest.raises(UnsupportedError, match="expandable segments"),
    ):
        win.export()


def test_wrong_lines_are_refused(node, program):
    with node.allocate_each(N, "f8") as win:
        word = str(win.export()).split()
        for place, text in ((3, "9" * 15), (4, "9" * 15), (5, "GPU-0"), (6, "0" * 128)):
            assert run_program(program, " ".join([*word[:place], text, *word[place + 1 :]]))[0] == 1
        win.fence()
