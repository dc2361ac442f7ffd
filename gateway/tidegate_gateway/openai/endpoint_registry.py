"""Which OpenAI endpoints does the gateway serve? The one list; everything else follows from its values."""

from tidegate_gateway.openai import chat_completions, completions, embeddings, responses

ENDPOINTS = (chat_completions.ENDPOINT, completions.ENDPOINT, embeddings.ENDPOINT, responses.ENDPOINT)
