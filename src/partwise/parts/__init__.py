"""Parts: small frozen dataclasses that are a configuration and the code that it configures.

`declare` says what a part is and what its fields may be, `text` reads and writes parts. The parts themselves are
where their code is: in `client`, `server`, `selection`, `algorithms`.
"""

from __future__ import annotations

from partwise.parts.declare import Part as Part
from partwise.parts.declare import choice as choice
from partwise.parts.declare import choices as choices
from partwise.parts.declare import flag as flag
from partwise.parts.declare import number as number
from partwise.parts.declare import numbers as numbers
from partwise.parts.declare import part as part
from partwise.parts.declare import rate as rate
from partwise.parts.declare import text as text
from partwise.parts.declare import whole as whole
