"""From client to server: one sum, and what it means."""
