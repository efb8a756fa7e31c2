"""The protocols that clients of a session speak: each file reads requests and writes replies of one of them."""
