"""How weights are stored: block sizes, where each bit lies, planes, separate scales, small floats."""
