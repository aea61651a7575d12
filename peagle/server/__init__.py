"""The OpenAI-compatible server: an asyncio front end over an engine that runs in a thread of its own."""
