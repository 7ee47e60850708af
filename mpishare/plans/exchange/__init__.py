"""The engines that move cells between ranks, one for each kind of memory."""
