"""Parts of a region that are computed together: blocks of layers, and gates with the layer behind them."""
