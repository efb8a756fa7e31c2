"""The client side of servers that speak SGLang's HTTP protocol."""
