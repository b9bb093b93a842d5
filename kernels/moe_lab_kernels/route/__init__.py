"""From router inputs to a plan: logits, expert ids and weights, (token, slot) pairs grouped by expert."""
