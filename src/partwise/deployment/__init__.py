"""The same algorithms over a network: a server, devices that come and go, and what lies between them."""
