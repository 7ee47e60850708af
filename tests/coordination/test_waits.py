"""The nodes of this process, as its threads look at them."""

from mpishare.coordination.control_block import ControlBlock
from mpishare.coordination.waits import Waits, of_this_thread
from mpishare.memory import shared


def test_nodes_are_made_and_dropped_while_others_are_looked_at():
    """As another thread does it, which may run between any two lines of this one."""
    block = ControlBlock(shared.create(ControlBlock.nbytes_for(1)), 0, 1)
    made = []

    class Looked(Waits):
        @property
        def ranks(self):
            made.append(Waits(block, 1.0))
            return {1: 0}

        @ranks.setter
        def ranks(self, value):
            pass

    node = Looked(block, 1.0)
    assert of_this_thread() == [node]
    assert of_this_thread() == [node]
    assert len(made) == 2
    block.close()
