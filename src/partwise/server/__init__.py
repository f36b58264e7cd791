"""What the server does in a round: choose clients, add up their reports, and take a step."""
