"""Networks: adapters at the border, built-in ones as plain functions on plain trees."""

from aleator.networks._network import Network, UserNetwork, as_network
from aleator.networks.conv import VGG, LeNet5, LeNet5Caffe, ResNet
from aleator.networks.mlp import MLP, Shallow
from aleator.networks.partial import Partial
from aleator.networks.pruned import Narrow, Pruned, PrunedSite
from aleator.networks.recurrent import GRU, LSTM
from aleator.networks.spectral import SpectralNorm
from aleator.networks.transformer import Transformer

__all__ = [
    "GRU",
    "LSTM",
    "MLP",
    "VGG",
    "LeNet5",
    "LeNet5Caffe",
    "Network",
    "Partial",
    "Narrow",
    "Pruned",
    "PrunedSite",
    "ResNet",
    "Shallow",
    "SpectralNorm",
    "Transformer",
    "UserNetwork",
    "as_network",
]
