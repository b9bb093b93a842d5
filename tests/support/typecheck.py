"""The checker that jaxtyping puts on every function under `make test`: beartype, whose `float` takes ints (PEP 484)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
