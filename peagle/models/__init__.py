"""Target models: Hugging Face configs, weights and tokenizers, and the decoder computed from them."""
