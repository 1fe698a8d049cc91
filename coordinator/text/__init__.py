"""Text and tokens: the tokenizer, chat parsing, incremental detokenization, and the model's recommendations."""
