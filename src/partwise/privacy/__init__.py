"""Privacy of clients: differential privacy and what it costs, and sums that show no client's part."""
