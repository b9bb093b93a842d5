"""For all tests: one torch thread. The tensors are small, and a second thread waits in barriers more than it works."""

import torch

torch.set_num_threads(1)
