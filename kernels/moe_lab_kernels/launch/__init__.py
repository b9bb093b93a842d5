"""How programs are cut on this device: tables of launch parameters, measured once, looked up at each launch."""
