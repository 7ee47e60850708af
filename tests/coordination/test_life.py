"""The life of a node: every cell of its table, and the page that shows it."""

import itertools
import re
from pathlib import Path

import pytest

from mpishare.coordination.control_block import ControlBlock
from mpishare.coordination.life import LIFE, Action, Event, Life, NodeLife
from mpishare.errors import MpiShareError
from mpishare.memory import shared

PAGE = Path(__file__).parents[2] / "docs" / "protocols.md"
ENDED = {each: LIFE[Life.WHOLE, each] for each in Event if each is not Event.REFUSAL}


@pytest.fixture
def life():
    block = ControlBlock(shared.create(ControlBlock.nbytes_for(2)), 0, 2)
    yield NodeLife(block, 1.0)
    block.close()


def test_the_table_has_every_cell():
    assert {*LIFE} == {*itertools.product(Life, Event)}


@pytest.mark.parametrize("event", ENDED)
def test_a_whole_node_ends(life, event):
    assert life.state is Life.WHOLE
    assert str(life.end(event, MpiShareError("the reason"))) == "the reason"
    assert Action(life.state, life.is_raised, life.is_fatal) == ENDED[event]
    assert str(life.failure) == "the reason"


def test_a_refusal_leaves_a_node_whole():
    assert LIFE[Life.WHOLE, Event.REFUSAL] == Action(Life.WHOLE)


@pytest.mark.parametrize(("first", "then"), [*itertools.product(ENDED, ENDED)])
def test_the_first_reason_stands(life, first, then):
    life.end(first, MpiShareError("first"))
    assert str(life.end(then, MpiShareError("then"))) == "first"
    assert life.state is ENDED[first].life
    assert life.is_fatal == ENDED[first].is_fatal


def test_the_page_shows_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    shown = [row for row in rows if row[0] in Event.__members__]
    assert shown == [
        (
            event.name,
            event.value,
            LIFE[Life.WHOLE, event].life.name.lower(),
            "; ".join(
                text
                for is_so, text in (
                    (LIFE[Life.WHOLE, event].is_raised, "the exception goes up"),
                    (LIFE[Life.WHOLE, event].is_fatal, "this process aborts the job at its end"),
                )
                if is_so
            ),
        )
        for event in Event
    ]
