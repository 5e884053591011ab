"""The client side: a client of a federation as a LightningModule, and the hooks that methods override."""
