"""The same federation at sites that keep their data, over Flower; needs the extra ``flower``."""
