"""Subclasses of SGLang's own classes: what runs inside a captured forward."""
