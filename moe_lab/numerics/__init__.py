"""One product under any arithmetic, on any arm, and how far two results lie apart."""
