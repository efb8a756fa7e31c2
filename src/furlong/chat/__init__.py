"""Chat messages as text and back: keys of messages, chat templates, parsers of replies, and the formats of clients."""
