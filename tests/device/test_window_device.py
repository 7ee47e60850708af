"""The record of a window for kernels, without a GPU."""

from unittest.mock import Mock

from mpishare.windows.window_device import WindowDevice


def test_a_window_that_was_dropped_in_a_cycle_closes():
    """Python clears weak references to a cycle before the node closes what was in it."""
    device = Mock(_is_closed=False, abort=8, of_address=WindowDevice.of_address)
    assert device.abort not in WindowDevice.of_address
    WindowDevice.close(device)
    assert device._is_closed
    device._words.close.assert_called_once()
