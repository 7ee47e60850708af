"""What people start, or ask for, beside the library: no other room but programs imports it."""
