"""Objects that share memory: windows, channels, pools and events, and the order on streams."""
