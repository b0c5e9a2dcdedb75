"""Registration of the backend "qao" with torch.compile."""

from ...inductor.backend import register as register
