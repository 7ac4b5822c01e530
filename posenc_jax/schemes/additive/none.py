"""NoPE: no position encoding at all.

Without a mask, self-attention is permutation-equivariant, so an encoder with this scheme does not
depend on the order of its tokens. A causal mask breaks the symmetry: each token attends to one
token more than the previous one, and causal models trained without position encodings learn
positions.

Papers: Haviv et al. Transformer Language Models without Positional Encodings Still Learn
Positional Information. 2022. https://arxiv.org/abs/2203.16634
Kazemnejad et al. The Impact of Positional Encoding on Length Generalization in
Transformers. NeurIPS 2023. https://arxiv.org/abs/2305.19466
"""

import dataclasses
from typing import ClassVar

from posenc_jax.schemes.scheme import Scheme, Traits, acts_of_hooks


@dataclasses.dataclass(frozen=True)
class NoPE(Scheme):
    """No position encoding (Haviv et al. 2022, Kazemnejad et al. 2023).

    >>> NoPE().rules({})
    ()
    """

    name: ClassVar[str] = "none"
    traits: ClassVar = Traits(relative=True, mirrored=True)

    @property
    def acts(self):
        return acts_of_hooks(type(self))
