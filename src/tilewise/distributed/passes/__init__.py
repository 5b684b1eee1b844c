"""The passes of convolutions on parts of an image, and the terms that halos add to them."""
