"""What `partwise reproduce` does: tables, figures and theory of the papers."""
