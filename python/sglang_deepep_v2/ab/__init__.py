"""The A/B of the prefill paths: real servers, the same prompts, compared logprobs, throughput and accuracy."""
