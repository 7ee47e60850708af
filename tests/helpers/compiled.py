"""Whether the compiled part of the host backend can be had here."""

import shutil

WHY_NONE = "" if shutil.which("cc") else "there is no C compiler"
