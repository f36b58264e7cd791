"""Which slices a client asks for, and how ids become rows."""
