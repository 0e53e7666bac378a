"""Search agents trained with GRPO and LLDS in JAX (arXiv 2512.04220).

Importing the package imports nothing heavy; `llds_loss` and `llds_penalty` are
fetched from `lld_jax.losses` on first use.
"""

__version__ = "0.1.0"
__all__ = ["llds_loss", "llds_penalty"]


def __getattr__(name: str):
    if name in __all__:
        from lld_jax import losses

        return getattr(losses, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
