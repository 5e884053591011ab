r"""FedGELA: a fixed simplex as the global classifier, and locally scaled by the client's shares of classes.

Source: Fan et al., 2023 (https://arxiv.org/abs/2302.02069). Symbols: h are a sample's features, C the number of classes,
M the fixed simplex of `fedetf.simplex`, n_kc client k's number of training samples of class c and n_k their sum.
"""
