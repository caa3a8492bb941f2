"""A generative adversarial network that draws handwritten digits: two networks, two optimizers, a fixed noise sample.

python examples/scripts/gan.py
polylane run examples/scripts/gan.py --workers 2 --plan pipeline=2
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader

import polylane

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--samples", type=int, default=1797)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--nz", type=int, default=16, help="size of the latent vector")
opt = parser.parse_args()

torch.manual_seed(999)
digits = torch.Tensor(load_digits().images[: opt.samples] / 8 - 1).unsqueeze(1)
dataloader = DataLoader(digits, batch_size=opt.batch_size, shuffle=True, drop_last=True)


class Generator(nn.Module):
    def __init__(self, nz, ngf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 2, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self, ndf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 2, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1)


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


netG, netD = Generator(opt.nz).apply(weights_init), Discriminator().apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(16, opt.nz, 1, 1)
optimizerD = optim.Adam(netD.parameters(), lr=0.001, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.001, betas=(0.5, 0.999))
netG, netD, optimizerG, optimizerD = polylane.prepare(netG, netD, optimizerG, optimizerD)

for epoch in range(opt.epochs):
    for real in dataloader:
        # update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        label = torch.full((len(real),), 1.0)
        output = netD(real)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()

        noise = torch.randn(len(real), opt.nz, 1, 1)
        fake = netG(noise)
        label.fill_(0.0)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        D_G_z1 = output.mean().item()
        errD = errD_real + errD_fake
        optimizerD.step()

        # update G: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(1.0)
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
        D_G_z2 = output.mean().item()
        optimizerG.step()

    with torch.no_grad():
        sample = netG(fixed_noise).detach()
    print(
        f"[{epoch + 1}/{opt.epochs}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f} D(x): {D_x:.4f} "
        f"D(G(z)): {D_G_z1:.4f} / {D_G_z2:.4f} ink of samples: {(sample + 1).mean():.4f}"
    )
