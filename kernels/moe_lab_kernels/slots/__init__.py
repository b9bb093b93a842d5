"""Where an expert lies: slots of an arena, or addresses."""
