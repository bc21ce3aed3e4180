"""GGUF files: their header, tokenizer, ends of texts and rotary scaling, as llama.cpp has them."""
