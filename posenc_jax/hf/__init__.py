"""Position encodings of models on the Hugging Face hub, from their configs."""
